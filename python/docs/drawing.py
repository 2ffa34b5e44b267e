"""Two maps of cells beside each other, as SVG: with the fault and without."""

import numpy as np

ROWS, COLUMNS, SIZE = 40, 28, 6
# Largest error over the root mean square of the reference, from which on a cell has this colour;
# last, what is no number.
LEVELS = [
    (1e-3, "#dbe7f3"), (4e-3, "#a9c7e3"), (1.6e-2, "#6d9fcb"), (6.3e-2, "#f2b35c"), (0.25, "#dd6b3a"), (1.0, "#a02020"),
]  # fmt: skip
NO_NUMBER = "#000000"


def cells(captured, reference):
    """The largest error of each cell over the reference's root mean square; NaN stays NaN."""
    scale = np.sqrt(np.nanmean(np.where(np.isfinite(reference), reference, np.nan) ** 2)) or 1.0
    error = np.abs(captured - reference) / scale
    error = np.where(np.isfinite(captured), error, np.nan)
    if error.shape[1] == 1:  # One number a token: in lines of a page.
        error = np.resize(np.append(error[:, 0], np.zeros(-len(error) % COLUMNS)), (-(-len(error) // COLUMNS), COLUMNS))
    rows, columns = min(ROWS, error.shape[0]), min(COLUMNS, error.shape[1])
    cuts = [np.linspace(0, size, parts + 1).astype(int) for size, parts in zip(error.shape, (rows, columns))]
    largest = np.full((rows, columns), np.nan)
    for i in range(rows):
        for j in range(columns):
            cell = error[cuts[0][i] : cuts[0][i + 1], cuts[1][j] : cuts[1][j + 1]]
            largest[i, j] = cell.max() if np.isfinite(cell).all() else np.nan
    return largest


def paths(largest, left, top):
    """One path a colour; neighbours in a row are one rectangle."""
    level = np.searchsorted([bound for bound, _ in LEVELS], np.nan_to_num(largest, nan=-1.0), side="right")
    level = np.where(np.isfinite(largest), level, len(LEVELS) + 1)
    found = []
    for index, colour in enumerate([*(colour for _, colour in LEVELS), NO_NUMBER], 1):
        words = []
        for i, row in enumerate(level == index):
            j = 0
            while j < len(row):
                end = j
                while end < len(row) and row[end]:
                    end += 1
                if end > j:
                    words.append(f"M{left + j * SIZE} {top + i * SIZE}h{(end - j) * SIZE}v{SIZE}h-{(end - j) * SIZE}z")
                j = max(end, j + 1)
        if words:
            found.append(f'<path fill="{colour}" d="{"".join(words)}"/>')
    return found


def svg(cause, title, below, pair, what):
    """The whole picture. `below`: the line below the cause; `what`: what the colour of a cell is."""
    width, height = COLUMNS * SIZE, max(part.shape[0] for part in pair) * SIZE
    gap, top = 24, 52
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    small = text.replace('"11"', '"9"')
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + gap + 40}" height="{top + height + 46}">',
        f"<title>{cause}: {title}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="20" y="18" {text} font-weight="bold">{cause}</text>',
        f'<text x="20" y="34" {text}>{below}</text>',
    ]
    for index, (title, largest) in enumerate(zip(("with the fault", "without"), pair)):
        left = 20 + index * (width + gap)
        out.append(f'<text x="{left}" y="{top - 4}" {text}>{title}</text>')
        box = f'width="{largest.shape[1] * SIZE}" height="{largest.shape[0] * SIZE}"'
        out.append(f'<rect x="{left}" y="{top}" {box} fill="#f7f7f7" stroke="#999"/>')
        out += paths(largest, left, top)
    x, y = 20, top + height + 14
    for bound, colour in [*LEVELS, (None, NO_NUMBER)]:
        label = "NaN" if bound is None else f"{bound:g}"
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 13}" y="{y + 9}" {small}>{label}</text>')
        x += 48
    out.append(f'<text x="20" y="{y + 24}" {small}>{what}, from</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
