"""What every other package uses: errors, bounds, names, files, printing, versions of torch."""

VERSION = "0.1.0"
