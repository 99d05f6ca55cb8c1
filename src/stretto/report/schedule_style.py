"""The CSS of schedule drawings, for light and dark mode.

The colours are those of Okabe and Ito (2008), which all kinds of colour vision can distinguish;
they are brightened on dark. The CSS uses classes without variables, because some SVG viewers lack
those.
"""

COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f5934a"),
    ("#009e73", "#35c99b"),
    ("#b04f88", "#e08fbe"),
    ("#9a6c00", "#e6b53c"),
    ("#5a6472", "#b3bdc9"),
)
"""(on light, on dark)"""

_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
_LIGHT = {
    "page": "#ffffff",
    "band": "#f4f6f9",
    "line": "#c3cad4",
    "ink": "#1b2430",
    "quiet": "#566172",
    "host": "#dde2e9",
}
_DARK = {
    "page": "#12161c",
    "band": "#1a2028",
    "line": "#4a5564",
    "ink": "#e7ebf0",
    "quiet": "#a3aebd",
    "host": "#323b47",
}


def _paints(shades: dict[str, str], mode: int) -> str:
    rules = [
        f".page,.pill{{fill:{shades['page']}}}",
        f".band{{fill:{shades['band']}}}",
        f".rank,.pill{{stroke:{shades['line']}}}",
        f".host{{stroke:{shades['host']}}}",
        f"text{{fill:{shades['ink']}}}",
        f"text.quiet{{fill:{shades['quiet']}}}",
        f".halo{{stroke:{shades['page']}}}",
        f".plain{{stroke:{shades['quiet']}}}",
    ]
    for index, colours in enumerate(COLOURS):
        colour = colours[mode]
        rules.append(
            f"line.c{index}{{stroke:{colour}}}.head.c{index},text.c{index}{{fill:{colour}}}"
        )
    return "".join(rules)


STYLE = (
    f"text{{font:13px {_FONT}}}"
    "text.title{font-size:17px;font-weight:600}"
    ".name,.label{text-anchor:middle}.name{font-weight:600;font-size:12px}"
    ".label{font-size:12px;font-weight:600}"
    ".halo{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
    ".rank,.pill,.host{stroke-width:1.5}.host{fill:none}"
    ".add,.copy{stroke-width:1.8}.copy{stroke-dasharray:6 4}"
    + _paints(_LIGHT, 0)
    + f"@media (prefers-color-scheme:dark){{{_paints(_DARK, 1)}}}"
)
