#!/bin/bash
mv notes.txt notes.md
