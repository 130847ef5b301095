// Line charts and stacked shares, with a reading for the pointer and the arrow keys.

const WIDTH = 400;
const HEIGHT = 190;
const EDGE = { left: 46, right: 10, top: 8, bottom: 30 };

function ticks(low, high, count, least = 0) {
  const span = high - low || 1;
  const rough = Math.max(span / count, least);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * unit).find((s) => s >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

// series: [{name, color, points: [[x, y], ...], dots}]; x values of one chart are on one scale.
function chart({ title, series, format = readable, xName, stacked = false, range = null }) {
  const drawn = series.filter((one) => one.points.some(([, y]) => isNumber(y)));
  const card = element("figure", { class: "chart" });
  card.style.margin = "0";
  card.append(element("h3", {}, title));
  if (!drawn.length) {
    card.append(element("p", { class: "muted small" }, "not recorded"));
    return card;
  }
  const xs = [...new Set(drawn.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  const at = drawn.map((one) => new Map(one.points));
  const layers = stacked ? stack(xs, at) : null;
  const values = stacked
    ? layers.flat().map(([, top]) => top)
    : drawn.flatMap((one) => one.points.map(([, y]) => y)).filter(isNumber);
  const [low, high] = range || bounds(values, stacked);
  const x = (value) =>
    EDGE.left + (WIDTH - EDGE.left - EDGE.right) *
      (xs.length > 1 ? (value - xs[0]) / (xs[xs.length - 1] - xs[0]) : 0.5);
  const y = (value) =>
    HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * ((value - low) / (high - low));
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
  svg.setAttribute("aria-label", title + ": arrow keys read the values");
  frame(svg, { xs, low, high, x, y, format, xName });
  if (stacked) drawn.forEach((one, i) => svg.append(area(one, layers[i], xs, x, y)));
  else drawn.forEach((one) => curve(svg, one, x, y));
  const legend = element("figcaption", { class: "legend" }, ...drawn.map(key));
  const reading = element("p", { class: "reading", "aria-live": "polite" });
  card.append(svg, legend, reading, asTable(drawn, at, xs, xName, format));
  follow(svg, xs, x, (place) => {
    const parts = drawn
      .map((one, i) => [one.name, at[i].get(xs[place])])
      .filter(([, value]) => isNumber(value))
      .map(([name, value]) => `${name} ${format(value)}`);
    reading.textContent = `${xName} ${readable(xs[place])}: ${parts.join(", ")}`;
  }, () => { reading.textContent = ""; });
  return card;
}

function bounds(values, fromZero) {
  let low = fromZero ? 0 : Math.min(...values);
  let high = Math.max(...values);
  if (!fromZero && low > 0 && low < 0.4 * high) low = 0;
  if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= low === 0 ? 0 : Math.abs(low) * 0.1; }
  const room = fromZero ? 0 : 0.04 * (high - low);
  return [low === 0 ? 0 : low - room, high + room];
}

function stack(xs, at) {
  const below = xs.map(() => 0);
  return at.map((values) => xs.map((x, place) => {
    const bottom = below[place];
    const value = values.get(x);
    below[place] += isNumber(value) ? value : 0;
    return [bottom, below[place]];
  }));
}

function frame(svg, { xs, low, high, x, y, format, xName }) {
  for (const value of ticks(low, high, 4)) {
    const place = y(value);
    svg.append(shape("line", {
      x1: EDGE.left, x2: WIDTH - EDGE.right, y1: place, y2: place, stroke: "var(--grid)",
    }));
    svg.append(shape("text", { x: EDGE.left - 6, y: place + 4, "text-anchor": "end" }, format(value)));
  }
  const bottom = HEIGHT - EDGE.bottom;
  svg.append(shape("line", {
    x1: EDGE.left, x2: WIDTH - EDGE.right, y1: bottom, y2: bottom, stroke: "var(--axis)",
  }));
  const least = xs.every(Number.isInteger) ? 1 : 0;
  const marks = xs.length > 1 ? ticks(xs[0], xs[xs.length - 1], 5, least) : xs;
  for (const value of marks) {
    svg.append(shape("text", { x: x(value), y: bottom + 14, "text-anchor": "middle" }, readable(value)));
  }
  svg.append(shape("text", {
    x: (EDGE.left + WIDTH - EDGE.right) / 2, y: HEIGHT - 2, "text-anchor": "middle",
  }, xName));
}

function curve(svg, one, x, y) {
  let path = "";
  let isOpen = false;
  for (const [at, value] of one.points) {
    if (!isNumber(value)) { isOpen = false; continue; }
    path += `${isOpen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    isOpen = true;
  }
  if (!one.dots) {
    svg.append(shape("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2, "stroke-linejoin": "round" }));
  }
  const known = one.points.filter(([, value]) => isNumber(value));
  if (one.dots || known.length < 2) {
    for (const [at, value] of known) {
      svg.append(shape("circle", { cx: x(at), cy: y(value), r: 4, fill: one.color, stroke: "var(--card)", "stroke-width": 1.5 }));
    }
  }
}

function area(one, layer, xs, x, y) {
  if (xs.length === 1) {
    const [bottom, top] = layer[0];
    return shape("rect", { x: x(xs[0]) - 20, width: 40, y: y(top), height: Math.max(0, y(bottom) - y(top)), fill: one.color });
  }
  const upper = xs.map((at, i) => `${x(at).toFixed(1)} ${y(layer[i][1]).toFixed(1)}`);
  const lower = xs.map((at, i) => `${x(at).toFixed(1)} ${y(layer[i][0]).toFixed(1)}`).reverse();
  return shape("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: one.color, stroke: "var(--card)", "stroke-width": 0.75 });
}

function key(one) {
  const swatch = element("i", { class: "swatch" });
  swatch.style.background = one.color;
  if (one.dots) swatch.style.borderRadius = "50%";
  return element("span", {}, swatch, one.name);
}

function asTable(drawn, at, xs, xName, format) {
  const details = element("details", {}, element("summary", {}, "Table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const rows = xs.map((x) => [readable(x), ...at.map((values) => format(values.get(x)))]);
    const columns = [xName, ...drawn.map((one) => one.name)];
    const numeric = new Set(columns.keys());
    details.append(element("div", { class: "scroll", tabindex: "0" }, table(columns, rows, numeric)));
  });
  return details;
}

// Show the values at the nearest x under the pointer, or stepwise with the arrow keys.
function follow(svg, xs, x, show, hide) {
  const rule = shape("line", {
    y1: EDGE.top, y2: HEIGHT - EDGE.bottom, stroke: "var(--ink-3)", "stroke-dasharray": "3 3", visibility: "hidden",
  });
  svg.append(rule);
  let place = xs.length - 1;
  const move = (next) => {
    place = Math.max(0, Math.min(xs.length - 1, next));
    rule.setAttribute("x1", x(xs[place]));
    rule.setAttribute("x2", x(xs[place]));
    rule.setAttribute("visibility", "visible");
    show(place);
  };
  const leave = () => { rule.setAttribute("visibility", "hidden"); hide(); };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    let nearest = 0;
    xs.forEach((value, i) => { if (Math.abs(x(value) - at) < Math.abs(x(xs[nearest]) - at)) nearest = i; });
    move(nearest);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) move(place); });
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    move(place + steps[event.key]);
  });
}
