"""Sources of text: what each holds, by what hash it is known, and how its parts are read."""
