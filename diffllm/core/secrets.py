"""Names of secrets, such as api_key, whose values must appear in no file and in no message."""

import re
import shlex

# The key data.eos_token names a token of the tokenizer, not a secret.
SECRET = r"(?:\w+_)?(?:api_?key|key|token|secret|password|passwd|credentials?)(?<!eos_token)"
SECRET_KEY = re.compile(rf"(?:[\w/@]+\.)*{SECRET}", re.I)
SECRET_IN_VALUE = re.compile(rf"\s*{{(?:.*,)?\s*{SECRET}\s*:.*", re.I | re.S)
SECRET_OPTION = re.compile(rf"-*([\w.]+[-_.])?{SECRET}", re.I)


def command_text(argv: list[str]) -> str:
    """Format command line arguments for a shell; replace values of secret options by "..."."""
    printed_words = []
    is_secret_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_secret_option = bool(SECRET_OPTION.fullmatch(name))
        if is_secret_value:
            printed_words.append("...")
        elif is_secret_option and equals:
            printed_words.append(f"{name}=...")
        else:
            printed_words.append(word)
        # The value of an option without "=", such as `--token VALUE`, is the next word.
        is_secret_value = is_secret_option and not equals and word.startswith("-")
    return shlex.join(printed_words)
