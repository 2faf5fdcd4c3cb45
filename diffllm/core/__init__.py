"""Modules that all packages use: errors, bounds, files, printing, registries, torch versions."""

VERSION = "0.1.0"
