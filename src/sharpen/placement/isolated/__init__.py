"""Attempts in processes of their own, without Ray."""
