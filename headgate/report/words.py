"""Numbers as the page writes them: a real minus sign, and no sign on what rounds to zero."""

import re

MINUS = "\N{MINUS SIGN}"


def with_real_minus(words: str) -> str:
    """A sentence whose numbers have a real minus sign."""
    return re.sub(r"(?<![\w.-])-(?=\d)", MINUS, words)


def with_sign(value: float | None, digits: int = 4) -> str:
    return "" if value is None else _without_sign_of_zero(f"{value:+.{digits}f}")


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else _without_sign_of_zero(f"{value:+.{digits}%}")


def percent_ends(low: float, high: float) -> str:
    """An interval; with a digit more where an end that is not 0 would be written as 0."""
    digits = 2 if any(end and percent(end) == percent(0.0) for end in (low, high)) else 1
    return f"{percent(low, digits)} to {percent(high, digits)}"


def decimal(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def p_in_words(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def bytes_in_words(value: float | None) -> str:
    if value is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} GB"


def _without_sign_of_zero(text: str) -> str:
    if not any(digit in text for digit in "123456789"):
        return text[1:]
    return text.replace("-", MINUS)
