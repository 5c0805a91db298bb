"""ECHO: which tokens the environment said, and the gradient that they add in the pass of the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
