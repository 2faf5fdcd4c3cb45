"""Names of limited length."""

import hashlib


def shortened(name: str, longest: int) -> str:
    """Replace the end of a name of more than `longest` characters by a hash of the name."""
    if len(name) <= longest:
        return name
    return f"{name[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
