"""Runs the loop during training: everything a plugin needs beside its framework."""
