"use strict";
const table = document.getElementById("main");
const headers = [...table.tHead.rows[0].cells];

function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
}

function sortBy(column) {
  const descending = headers[column].getAttribute("aria-sort") === "ascending";
  headers.forEach((header) => header.setAttribute("aria-sort", "none"));
  headers[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  const order = (row) => row.cells[column].dataset.order;
  const rows = [...table.tBodies[0].rows];
  const known = rows.filter((row) => order(row) !== undefined);
  known.sort((a, b) => (descending ? -1 : 1) * compare(order(a), order(b)));
  const unknown = rows.filter((row) => order(row) === undefined);
  table.tBodies[0].append(...known, ...unknown);
}

headers.forEach((header, column) => {
  header.querySelector("button").addEventListener("click", () => sortBy(column));
});

// Values under the pointer. Curves are read from their paths: data-x and data-y hold two values of
// an axis, each before its pixel.
const names = JSON.parse(document.body.dataset.names);
const values = document.createElement("div");
values.id = "values";
values.hidden = true;
values.setAttribute("role", "status");
document.body.append(values);

function axis(text, log) {
  const [a, p, b, q] = text.split(" ").map(Number);
  const [from, to] = log ? [Math.log10(a), Math.log10(b)] : [a, b];
  return {
    ends: [Math.min(p, q), Math.max(p, q)],
    value(pixel) {
      const at = from + ((pixel - p) * (to - from)) / (q - p);
      return log ? 10 ** at : at;
    },
  };
}

function written(x) {
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) return x.toExponential(2);
  return x.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function amount(x, unit) {
  const how = { notation: "compact", maximumSignificantDigits: 3 };
  const number = x < 1e15 ? x.toLocaleString("en", how).replace("K", "k") : x.toExponential(2);
  return `${number} ${unit}`;
}

function segments(path) {
  const found = [];
  let last = null;
  let first = null;
  for (const [, kind, x, y] of (path.getAttribute("d") ?? "").matchAll(/([MLz])(?: (\S+) (\S+))?/g)) {
    const point = kind === "z" ? first : [Number(x), Number(y)];
    if (kind === "M") first = point;
    else found.push([last, point]);
    last = point;
  }
  return found;
}

// The y of a line at x, or both of a band; none where it has a gap.
function crossings(path, x) {
  path.segments ??= segments(path);
  return path.segments
    .filter(([a, b]) => Math.min(a[0], b[0]) <= x && x <= Math.max(a[0], b[0]))
    .map(([a, b]) => (a[0] === b[0] ? a[1] : a[1] + ((x - a[0]) * (b[1] - a[1])) / (b[0] - a[0])));
}

function line(style, near, text, number) {
  const row = document.createElement("div");
  row.className = near ? "near" : "";
  if (style !== null) {
    const dot = document.createElement("i");
    dot.style.background = `var(--r${style})`;
    row.append(dot);
  }
  row.append(document.createElement("span"), document.createElement("b"));
  row.querySelector("span").textContent = text;
  row.querySelector("b").textContent = number;
  return row;
}

function ofMap(svg, x, y) {
  const rows = (svg.rows ??= svg.dataset.grid.split(";").map((layer) => layer.split(",")));
  const share = (at, [low, high]) => Math.min(Math.max((at - low) / (high - low), 0), 0.9999);
  const [across, up] = [share(x, svg.across.ends), 1 - share(y, svg.up.ends)];
  const layer = rows[Math.min(Math.floor(up * rows.length), rows.length - 1)];
  const value = layer[Math.floor(across * layer.length)];
  const head = `layer ${rows.indexOf(layer)}, ${amount(svg.across.value(x), "tokens")}`;
  return [line(null, true, head, value || "–")];
}

function ofCurves(svg, x, y) {
  const found = names.flatMap(([label, run], i) => {
    const pick = (what) => [...svg.querySelectorAll(`.row-${i}${what} > path`)]
      .filter((path) => path.getClientRects().length);
    const at = (paths) => paths.flatMap((path) => crossings(path, x));
    const [mean] = at(pick(":not(.band,.single,.lane,.stop)"));
    const ends = at(pick(".band")).concat(mean === undefined ? at(pick(".single")) : []);
    if (mean === undefined && !ends.length) return [];
    const range = ends.length > 1 ? [Math.max(...ends), Math.min(...ends)] : [];
    return [{ i, label, run, at: mean ?? ends[0], range }];
  });
  found.sort((a, b) => a.at - b.at);
  const nearest = Math.min(...found.map((each) => Math.abs(each.at - y)));
  const lines = found.map((each) => {
    const ends = each.range.map((end) => written(svg.up.value(end))).join(" to ");
    const near = Math.abs(each.at - y) === nearest;
    const made = line(each.i, near, each.label, written(svg.up.value(each.at)));
    const more = document.createElement("small");
    more.textContent = [near ? each.run : "", ends].filter(Boolean).join(", ");
    made.querySelector("span").append(" ", more);
    return made;
  });
  const where = svg.across.value(x);
  const unit = svg.dataset.across;
  const head = unit === "layer" ? `${unit} ${Math.round(where)}` : amount(where, unit);
  return lines.length ? [line(null, false, head, ""), ...lines.slice(0, 14)] : [];
}

function show(svg, x, y) {
  [svg.atX, svg.atY] = [x, y];
  const [left, right] = svg.across.ends;
  let at = Math.min(Math.max(x, left), right);
  if (!svg.dataset.grid) {
    const drawn = [...svg.querySelectorAll(".row:not(.band,.lane,.stop) > path")]
      .filter((path) => path.getClientRects().length)
      .flatMap((path) => (path.segments ??= segments(path)).flat().map(([px]) => px));
    at = drawn.reduce((best, px) => (Math.abs(px - x) < Math.abs(best - x) ? px : best), at - 1e6);
  }
  const lines = svg.dataset.grid ? ofMap(svg, at, y) : ofCurves(svg, at, y);
  values.hidden = lines.length === 0;
  values.replaceChildren(...lines);
  const box = svg.getBoundingClientRect();
  const scale = box.width / svg.viewBox.baseVal.width;
  Object.entries({ x1: at, x2: at, y1: svg.up.ends[0], y2: svg.up.ends[1] })
    .forEach(([key, value]) => svg.cursor.setAttribute(key, value));
  svg.append(svg.cursor);
  const [px, py] = [box.left + at * scale, box.top + y * scale];
  const [wide, high] = [values.offsetWidth, values.offsetHeight];
  const beside = px + 14 + wide > innerWidth ? px - 14 - wide : px + 14;
  values.style.left = `${Math.max(4, beside)}px`;
  values.style.top = `${Math.max(4, Math.min(py - high / 2, innerHeight - high - 4))}px`;
}

function hide(svg) {
  values.hidden = true;
  svg.cursor.remove();
}

for (const svg of document.querySelectorAll("svg[data-x]")) {
  svg.across = axis(svg.dataset.x, false);
  svg.up = axis(svg.dataset.y, svg.dataset.log);
  svg.cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  svg.cursor.setAttribute("class", "cursor");
  svg.querySelectorAll("title").forEach((title) => title.remove());
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    show(svg, (event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", () => hide(svg));
  svg.addEventListener("blur", () => hide(svg));
  svg.tabIndex = 0;
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") hide(svg);
    if (!step) return;
    event.preventDefault();
    const [[left, right], [top, bottom]] = [svg.across.ends, svg.up.ends];
    const steps = svg.dataset.across === "layer" ? 24 : 60;
    const clamped = (value, low, high) => Math.min(Math.max(value, low), high);
    const x = clamped((svg.atX ?? left) + (step[0] * (right - left)) / steps, left, right);
    const y = clamped((svg.atY ?? bottom) + (step[1] * (bottom - top)) / 16, top, bottom);
    show(svg, x, y);
  });
}
