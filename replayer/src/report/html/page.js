(() => {
  "use strict";
  const RECORD = 44, NONE = 0xffff;
  const plain = (x) => Number.isFinite(x) ? String(Number(x.toPrecision(7))) : String(x);
  const many = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  // The blocks of one strip, as report/html/maps.rs writes them.
  const read = (strip) => {
    const text = atob(strip.blocks);
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
    return new DataView(bytes.buffer);
  };
  const block = (strip, band, column) => {
    if (band >= strip.bands) return null;
    const view = strip.view, at = (band * strip.columns + column) * RECORD;
    const of = view.getUint16(at + 42, true);
    if (of === NONE) return null;
    return {
      row: view.getFloat64(at, true), column: view.getUint32(at + 8, true),
      captured: view.getFloat64(at + 12, true), reference: view.getFloat64(at + 20, true),
      score: view.getFloat32(at + 28, true), exceeding: view.getUint32(at + 32, true),
      hits: view.getUint32(at + 36, true), nonfinite: view.getUint16(at + 40, true),
      source: strip.sources[of],
    };
  };

  const sentence = (map, found) => {
    if (!found) return "nothing was compared here";
    const parts = [
      `${map.stage} [${found.row}, ${found.column}] captured ${plain(found.captured)} reference ${plain(found.reference)}`,
      found.nonfinite > 0 ? many(found.nonfinite, "value") + " of the block not finite"
        : found.score === 0 ? "equal" : `${plain(Number(found.score.toPrecision(3)))} σ`,
      `${many(found.exceeding, "element")} of the block beyond the bound`,
    ];
    const [microbatch, rank] = found.source;
    if (microbatch !== null) parts.push(`microbatch ${microbatch}`);
    if (rank !== null) parts.push(`rank ${rank}`);
    if (map.rows === "row" && map.tile > 0) {
      const first = Math.floor(found.row / map.tile) * map.tile;
      parts.push(`tile [${first}:${first + map.tile}]`);
      if (map.hits) parts.push(`row ${found.row} is a label ${many(found.hits, "time")}`);
    }
    return parts.join(", ");
  };

  const start = (map) => {
    const grid = document.getElementById(map.id);
    const status = document.getElementById(`${map.id}-status`);
    const cell = document.getElementById(`${map.id}-cell`);
    if (!grid || !status || !cell) return;
    const svg = grid.querySelector("svg"), hit = svg.querySelector(".bt-hit");
    const cursor = svg.querySelector(".bt-cursor");
    map.strips.forEach((strip) => { strip.view = read(strip); });
    const last = map.strips[map.strips.length - 1];
    const across = last.x + last.columns;
    const at = { x: 0, band: 0 };

    const strip = (x) => map.strips.find((one) => x >= one.x && x < one.x + one.columns);
    const show = (x, band) => {
      const one = strip(x);
      if (!one || band < 0 || band >= map.bands) return;
      at.x = x;
      at.band = band;
      const found = block(one, band, x - one.x), words = sentence(map, found);
      cursor.setAttribute("x", x);
      cursor.setAttribute("y", band);
      cursor.setAttribute("visibility", "visible");
      status.textContent = words;
      for (const name of ["row", "column", "captured", "reference"]) {
        if (found) status.dataset[name] = String(found[name]);
        else delete status.dataset[name];
      }
      cell.textContent = words;
      cell.setAttribute("aria-colindex", x + 1);
      cell.parentElement.setAttribute("aria-rowindex", band + 1);
      grid.setAttribute("aria-activedescendant", cell.id);
    };
    const worst = () => {
      const ring = svg.querySelector(".bt-ring");
      if (ring) show(Number(ring.getAttribute("x")), Number(ring.getAttribute("y")));
    };
    // A column between two strips is no block: on in the same direction.
    const step = (by) => {
      let x = at.x + by;
      while (x >= 0 && x < across && !strip(x)) x += by;
      if (x >= 0 && x < across) show(x, at.band);
    };
    const grow = (by) => {
      const box = svg.viewBox.baseVal, size = Number(svg.dataset.size || 1) * by;
      if (size < 0.5 || size > 4) return;
      svg.dataset.size = size;
      svg.setAttribute("width", box.width * size);
      svg.setAttribute("height", box.height * size);
    };
    const within = (band) => Math.min(Math.max(band, 0), map.bands - 1);
    const keys = {
      ArrowLeft: () => step(-1), ArrowRight: () => step(1),
      ArrowUp: () => show(at.x, within(at.band - 1)), ArrowDown: () => show(at.x, within(at.band + 1)),
      PageUp: () => show(at.x, within(at.band - 8)), PageDown: () => show(at.x, within(at.band + 8)),
      Home: () => show(0, at.band), End: () => show(across - 1, at.band),
      w: worst, W: worst, "+": () => grow(1.25), "-": () => grow(0.8),
    };
    grid.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      // A notebook has keys of its own.
      event.stopPropagation();
      act();
    });
    grid.addEventListener("focus", () => {
      if (cursor.getAttribute("visibility") === "hidden") worst();
    });
    const pointed = (event) => {
      const box = hit.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left) / box.width * across);
      const band = Math.floor((event.clientY - box.top) / box.height * map.bands);
      if (x >= 0 && x < across) show(x, band);
    };
    hit.addEventListener("pointermove", pointed);
    hit.addEventListener("pointerdown", pointed);
  };

  // Whether a name is asked for: by a part of it, or by a pattern in which * and ? stand for others.
  const asked = (text) => {
    const wanted = text.trim().toLowerCase();
    if (!/[*?]/.test(wanted)) return (name) => name.includes(wanted);
    const literal = wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&");
    const pattern = new RegExp(`^${literal.replace(/\*+/g, ".*").replace(/\?/g, ".")}$`);
    return (name) => pattern.test(name);
  };

  const MARKS = ["–", "✓", "?", "≠", "✕"];
  // How a cell is sorted: by its mark, and of the same mark by its number.
  const weight = (text) => {
    const mark = MARKS.indexOf(text[0]), number = Number(text.replace(/[✓✕≠?–,\s]/g, "").replace("inf", "Infinity"));
    return [mark, Number.isNaN(number) ? Infinity : number];
  };
  const compare = (a, b) => a[0] - b[0] || (a[1] === b[1] ? 0 : a[1] - b[1]);

  // The table of all parameters of a step; returns what asks it for a name and a stage.
  const parameters = (root) => {
    const table = root.querySelector(".bt-parameters"), filter = root.querySelector(".bt-filter");
    if (!table || !filter) return null;
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const words = heads.map((head) => head.textContent);
    // Columns before the stages; the third of them is a number.
    const lead = Number(table.dataset.lead), isText = (column) => column < lead && column !== 2;
    const rows = [...body.rows].map((row, at) => ({
      row, at, kind: row.dataset.kind, name: row.cells[0].textContent.toLowerCase(),
      cells: [...row.cells].map((cell) => cell.textContent),
    }));
    const [name, stage, status] = ["name", "stage", "status"].map((by) => filter.querySelector(`.bt-by-${by}`));
    const shown = filter.querySelector(".bt-count");

    // A kind that was picked, until another name is written.
    let picked = null;
    const show = () => {
      const part = asked(name.value), column = words.indexOf(stage.value), mark = status.value;
      // Without a stage: any that fails or is unchecked, but only what passes at every stage passes.
      const has = ({row, cells}) => {
        if (column >= lead) return mark ? cells[column][0] === mark : cells[column] !== "–";
        if (mark === "✓") return row.className === "bt-pass";
        return !mark || cells.slice(lead).some((text) => text[0] === mark);
      };
      const exact = picked && picked.name === name.value;
      const fits = (one) => exact ? one.kind === picked.kind : part(one.name);
      let count = 0;
      for (const one of rows) {
        const fit = fits(one) && has(one);
        one.row.hidden = !fit;
        count += fit ? 1 : 0;
      }
      table.toggleAttribute("data-filtered", count < rows.length);
      shown.textContent = `${count.toLocaleString("en")} of ${many(rows.length, "row")}`;
    };
    const pick = (next) => {
      picked = next;
      name.value = next ? next.name : "";
      stage.value = status.value = "";
      show();
    };
    const sort = (column) => {
      const before = heads[column].getAttribute("aria-sort");
      const turn = {descending: "ascending", ascending: null}[before];
      const next = before ? turn : isText(column) ? "ascending" : "descending";
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      const by = new Intl.Collator("en", {numeric: true});
      const order = isText(column) ? (a, b) => by.compare(a.cells[column], b.cells[column])
        : (a, b) => compare(a.weight, b.weight);
      rows.forEach((one) => { one.weight = weight(one.cells[column]); });
      const sign = next === "descending" ? -1 : 1;
      if (next) heads[column].setAttribute("aria-sort", next);
      rows.sort((a, b) => (next ? sign * order(a, b) : 0) || a.at - b.at);
      body.append(...rows.map((one) => one.row));
    };
    heads.forEach((head, column) => {
      const button = Object.assign(document.createElement("button"), {type: "button", className: "bt-sort"});
      button.textContent = words[column];
      button.addEventListener("click", () => sort(column));
      head.replaceChildren(button);
    });
    for (const input of [name, stage, status]) input.addEventListener("input", show);
    // A notebook has keys of its own.
    filter.addEventListener("keydown", (event) => event.stopPropagation());
    filter.querySelector(".bt-all").addEventListener("click", () => pick(null));
    filter.hidden = false;
    show();
    return {rows, words, pick};
  };

  // The kinds of parameters by stages: a block says what it is of, and a kind is shown in the table.
  const kinds = (root, table) => {
    const map = root.querySelector(".bt-kinds");
    if (!map || !table) return;
    const status = document.getElementById(map.id.replace(/-map$/, "-status"));
    const heads = [...map.tHead.rows[0].cells].map((head) => head.textContent);
    const members = new Map();
    for (const one of [...table.rows].sort((a, b) => a.at - b.at)) {
      if (!members.has(one.kind)) members.set(one.kind, []);
      members.get(one.kind).push(one);
    }
    for (const head of map.querySelectorAll("tbody th")) {
      const button = Object.assign(document.createElement("button"), {type: "button", className: "bt-pick"});
      button.append(...head.childNodes);
      button.title = "show these in the table below";
      button.addEventListener("click", () => {
        table.pick({name: head.dataset.name, kind: head.parentElement.dataset.kind});
        root.querySelector(".bt-filter").scrollIntoView({block: "nearest"});
      });
      head.append(button);
    }
    const pointed = (event) => {
      const cell = event.target.closest("td");
      if (!cell) return;
      const strip = cell.querySelector("svg"), stage = heads[cell.cellIndex], row = cell.parentElement;
      status.textContent = `${row.cells[0].textContent}, ${cell.title}`;
      // Where the table has no room for all parameters the blocks are those of others too.
      const of = members.get(row.dataset.kind) || [], count = row.querySelector("small");
      if (!strip || of.length !== Number(count ? count.textContent : 1)) return;
      const box = strip.getBoundingClientRect(), blocks = strip.viewBox.baseVal.width;
      const block = Math.floor((event.clientX - box.left) / box.width * blocks);
      const here = of.filter((_, at) => Math.floor(at * blocks / of.length) === block);
      const column = table.words.indexOf(stage);
      const worst = here.sort((a, b) => compare(weight(b.cells[column]), weight(a.cells[column])))[0];
      if (!worst) return;
      const found = worst.row.cells[column];
      status.textContent = `${worst.cells[0]}, ${stage}: ${found.title || found.textContent}`;
    };
    map.addEventListener("pointermove", pointed);
    map.addEventListener("pointerdown", pointed);
  };

  const THEMES = ["system", "light", "dark"];
  const theme = (root) => {
    const button = root.querySelector(".bt-theme");
    if (!button) return;
    button.hidden = false;
    button.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length];
      for (const of of [root, document.body.classList.contains("backtape-page") ? document.body : root]) {
        if (next === "system") delete of.dataset.theme;
        else of.dataset.theme = next;
      }
      button.textContent = `theme: ${next}`;
    });
  };

  for (const root of document.querySelectorAll(".backtape:not([data-ready])")) {
    const data = root.querySelector("script.bt-data");
    if (!data) continue;
    root.dataset.ready = "yes";
    theme(root);
    for (const step of root.querySelectorAll(".bt-step")) kinds(step, parameters(step));
    JSON.parse(data.textContent).maps.forEach(start);
  }
})();
