"""How models write answers: what introduces one, and the value of a number, which is never that of a part."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# A letter beside others of Latin script is none of its own; Chinese, Japanese and Korean words have no space
# between them and a letter.
LETTER = "[A-Za-z\u00c0-\u024f]"
# Letters of scripts in which a word has an end; others go on with the next word, or a particle.
SPACED = r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
# "The answer is", "Answer:" and their like, without regard to case; what stands between the two a task says.
ANSWER = (
    r"(?:(?<![a-z])answer(?![a-z])|答案|答え|正解|정답|답(?=[은:])|ответ|antwort|respuesta|réponse|resposta"
    r"|risposta|jawaban|cevap|đáp án|उत्तर|الإجابة|الجواب|คำตอบ)"
)
IS = (
    r"(?:(?<![a-z])(?:is|(?:would|should|must|has to) be|es|est|ist|lautet|é|è)(?![a-z])(?!\s*not\b)"
    r"|[:=]| [-–—] |(?<!不)[是为為应應选選]|は|은|คือ|هي|هو)"
)
# Thousands are grouped by commas, apostrophes, underscores, or (narrow, fixed) spaces.
SPACES = " \u00a0\u2009\u202f"
GROUPED = rf"(?!0,)\d{{1,3}}(?:(?:,\d{{2,3}})*,\d{{3}}|(?:['’]\d{{3}})+|(?:[{SPACES}]\d{{3}})+)|\d+(?:_\d+)*"
ENGLISH = re.compile(rf"(?:{GROUPED})?(?:\.\d+)?")
# Numbers with a decimal comma, or with several points, which can only group.
EUROPEAN = re.compile(rf"(?:\d{{1,3}}(?:[.{SPACES}]\d{{3}})+|\d+),\d\d?|0,\d+|\d{{1,3}}(?:\.\d{{3}}){{2,}}")
LONGEST = 40  # Where a model repeats a digit for ever, there is no number.
# What multiplies the number before it: letters, and words by their factor. 千克 is a kilogram.
LETTERS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
SCALES = {
    12: "dozens?", 10**2: "hundreds?|百(?!分)|백", 10**4: "[万萬만]", 10**5: "lakhs?|lacs?|लाख",
    10**3: "thousands?|mil|mille|tausend|тыс[а-я]*|ألف|हज़ार|千(?![克米瓦卡])|천",
    10**6: "mn|mio|millions?|mill[oó]n(?:es)?|millionen|milh(?:ão|ões)|milion[ei]|млн|миллион[а-я]*|مليون",
    10**7: "crores?|करोड़", 10**8: "[亿億억]", 10**12: "trillions?",
    10**9: "bn|billions?|milliards?|milliarden|mrd|млрд|миллиард[а-я]*|مليار",
}  # fmt: skip
SCALE = rf"(?:(?<=\d)[{''.join(LETTERS)}]| ?(?i:{'|'.join(SCALES.values())}))(?!{LETTER})"
MINUS = r"(?:-|(?i:minus|negative) )"
CURRENCY = r"(?:[$€£¥₹₩₽₺₫₱]|Rs\.? ?|(?:USD|EUR|GBP|INR) ?)"
FIGURE = rf"(?:\d{{1,3}}(?:[{SPACES}]\d{{3}}(?!\d))+|\.?\d)(?:\d|[.,:'’_](?=\d))*"
NUMBER = re.compile(
    rf"\+?(?P<minus>{MINUS})?(?:{CURRENCY}(?P<dash>-)?)?"
    rf"(?:(?P<larger>{FIGURE})(?P<scale>{SCALE})(?: and)? ?(?=\d)"
    r"|(?P<whole>\d+)(?: and |[ -])(?=\d\d? ?/)"
    rf"|(?P<times>{FIGURE}) ?[x×*·] ?(?={FIGURE} ?(?:\^|\*\*)))?"
    rf"(?P<base>{FIGURE})(?: ?/ ?(?P<divisor>{FIGURE})| ?(?:\^|\*\*) ?[{{(]?(?P<power>-?\d\d?)"
    rf"|[eE](?P<tens>[-+]?\d\d?))?(?P<last_scale>{SCALE})?[%°]?(?: out of {FIGURE})?(?: [a-z]+){{0,2}}"
)
# A minus directly after a word or a number is a dash, as in 3-4.
BEFORE = rf"(?:\+|√|(?<!{SPACED})(?<![.)\]}}%]){MINUS})?(?:{CURRENCY}-?)?[({{\[]{{0,3}}"
LOWER = rf"(?:(?<=[百千万萬亿億백천만억])| and) ?{FIGURE}(?:{SCALE})?"
TERM = rf"{BEFORE}{FIGURE}(?:[eE][-+]?\d+)?(?:{SCALE}(?:{LOWER})?)?[%°π]?"
# What makes several numbers one expression: a calculation with its units, a fraction, a range, a list, an
# amount in two units. A list has an end: "18, 9 times 2" says two things.
GAP = r"[ \t()\[\]{}$]{0,6}"
LIST = r",(?=(?: and| or)? ?\d[\d.,]{0,20}(?:[ .]{0,2}[)}]|\.?\s*$|\.\s|,? (?:and|or) \d|, \d))(?: and| or)?"
WORDS = r"(?<= )(?:plus|minus|times|divided by|to|or|and|out of|of(?= ?[\d.,]+ ?=)) (?=[-$€£(√]?\d)"
UNITS = r"(?:hours?|hrs?|h|feet|foot|ft|days?|weeks?|years?|minutes?|mins?|pounds?|lbs?|dollars?),?(?= ?\d)"
MONTHS = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?(?= \d)"
JOIN = (
    rf"(?:(?<=\d)(?:\*\*|~)(?=\d)|(?<=[\d)}}])\^|[-+*/×÷·√±]| : |\s*[=≈]|x(?=[ \d$(])| (?=\d+ ?/ ?\d)"
    rf"|{LIST}|{WORDS}|{UNITS}|{MONTHS})"
)
# Names, such as H2O and GPT-4, units, such as m^2, and what a letter is divided by are no numbers.
START = rf"(?<![A-Za-z\d/])(?<!/[({{])(?<![A-Za-z][-_^])(?<![A-Za-z]\^\{{)(?<!\d[.,:'’_])(?={BEFORE}\.?\d)"
EXPRESSION = re.compile(rf"{START}{TERM}(?:(?: [a-z]+){{0,2}}{GAP}{JOIN}{GAP}{TERM})*(?:[ \t]*[-+=/×÷]\s*$)?")
COMMANDS = {
    "times": "×", "cdot": "·", "div": "÷", "approx": "≈", "sqrt": "√", "pi": "π", "pm": "±", "left": "",
    "right": "", "quad": " ", "qquad": " ",
}  # fmt: skip
PART = r"\s{0,3}(?:\{([^{}]{0,50})\}|(\d))"
HALVES = {"half": " 1/2", "quarter": " 1/4"}
SIGNS = str.maketrans("−–‐‑⁄٫٬", "----/.,")
HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if code != ord("，")} | {0x3000: " "}


def value(expression: str) -> Fraction | None:
    """The value of a match of :data:`EXPRESSION`: a number, or what a calculation comes to; None for a range,
    a ratio, a time, a date, a list, or a calculation without a result."""
    values = [_number(part.strip(" \t\n()[]{}$")) for part in re.split("[=≈]", expression)]
    return next((each for each in reversed(values) if each is not None), None)


def _number(text: str) -> Fraction | None:
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        number = _figure(match["base"]) / _figure(match["divisor"] or "1") + _figure(match["whole"] or "0")
        number = number ** int(match["power"] or 1) * Fraction(10) ** int(match["tens"] or 0)
        number *= _figure(match["times"] or "1") * _factor(match["last_scale"])
        number += _figure(match["larger"] or "0") * _factor(match["scale"])
    except (ValueError, ZeroDivisionError):
        return None
    return -number if match["minus"] or match["dash"] else number


def _figure(text: str) -> Fraction:
    """Raises ValueError for a text that is not a number."""
    text = text if len(text) <= LONGEST else ""
    if ENGLISH.fullmatch(text):
        return Fraction(re.sub(rf"[,'’_{SPACES}]", "", text))
    return Fraction(re.sub(rf"[.{SPACES}]", "", text).replace(",", ".") if EUROPEAN.fullmatch(text) else "")


def _factor(word: str | None) -> int:
    word = (word or "").strip()
    found = (factor for factor, words in SCALES.items() if re.fullmatch(f"(?i:{words})", word))
    return LETTERS.get(word) or next(found, 1)


def plain(text: str) -> str:
    """``text`` with one way of writing every digit, sign, fraction and power, and without LaTeX's markup."""
    text = half_width(re.sub("(?<=[０-９])，(?=[０-９]{3})", ",", text))
    text = re.sub(r"(?![0-9])\d", lambda match: str(int(match[0])), text)
    text = re.sub("[¼-¾⅐-⅞]", lambda match: " " + unicodedata.normalize("NFKC", match[0]), text)
    text = re.sub("⁻?[⁰¹²³⁴-⁹]+", lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = re.sub(r"(?<=\d),?(?:\{,\}|\\[,!;: ])(?=\d{3})", ",", text.translate(SIGNS))
    text = re.sub(r"\^\{?\\circ\}?", "°", re.sub(r"\\([$%])", r"\1", text))
    text = re.sub(r"\\(?:text|math)\w*\s{0,3}\{([^{}]{0,200})\}", r"\1", text)
    text = re.sub(rf"((?<=\d)\s{{1,3}}|)\\[dtc]?frac{PART}{PART}", _fraction, re.sub(r"\\[!,;: ]", " ", text))
    text = re.sub(r"\\([a-z]+)(?![a-z])", lambda match: COMMANDS.get(match[1], f"{match[0]} "), text)
    text = re.sub(r"(?<=\d) and (?:a|one)[ -](half|quarter)\b", lambda match: HALVES[match[1]], text)
    text = re.sub(r"(\d) dollars? and (\d\d) cents?\b", r"\1.\2", text)
    return re.sub(r"([$€£]\d[\d.,]*) ?m(?![a-z\d])", r"\1M", text)


def _fraction(match: re.Match[str]) -> str:
    above, below = (match[2] or match[3] or "").strip(), (match[4] or match[5] or "").strip()
    space = " " if match.string[: match.end(1)][-1:].isdigit() else match[1][:1]
    return space + (f"{above}/{below}" if above.isdigit() and below.isdigit() else f"({above})/({below})")


def half_width(text: str) -> str:
    """``text`` with the letters, digits and signs of ASCII in place of the full-width ones."""
    return text.translate(HALF_WIDTH)
