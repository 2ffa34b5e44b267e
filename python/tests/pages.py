"""Reads a page or a fragment of one: whether every tag is closed, and what its tables hold."""

from html.parser import HTMLParser

# Tags that have no end.
VOID = {"meta", "input", "br", "link"}


class Page(HTMLParser):
    """A page as it was parsed. `tables` by their class: rows of cells, each its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tables = [], [], {}
        self.rows, self.cell = None, None
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.ids += [of["id"]] if "id" in of else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables.setdefault(of.get("class"), [])
        elif tag == "tr" and self.rows is not None:
            self.rows.append([])
        elif tag in ("th", "td"):
            self.cell = ""

    def handle_startendtag(self, tag, attributes):
        """Pictures have tags without an end."""

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()} ends nothing"
        if tag in ("th", "td"):
            self.rows[-1].append(" ".join(self.cell.split()))
            self.cell = None
        elif tag == "table":
            self.rows = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data
