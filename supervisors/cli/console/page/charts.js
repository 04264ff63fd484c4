// Line charts by step, as SVG. A chart is told its rows again whenever there are more; it draws at most two points a pixel.

import { el, svg, number, showTip, hideTip, whenWidened } from "./elements.js";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const MARGIN = { left: 44, right: 10, top: 8, bottom: 20 };
const BY_STEP = new Set(); // charts by step: a reader who points at a step of one sees it in all
const SMOOTH = 20; // as many parts of the run have a mean of their own

/** A running mean over a twentieth of the steps, over those that have a value. */
export function smooth(values) {
  const width = Math.max(1, Math.floor(values.length / SMOOTH));
  if (width === 1) return values;
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (known(value) ? value : 0));
    counts.push(counts.at(-1) + (known(value) ? 1 : 0));
  }
  return values.map((_, i) => {
    const a = Math.max(0, i - Math.floor(width / 2)), b = Math.min(values.length, a + width);
    return counts[b] > counts[a] ? (sums[b] - sums[a]) / (counts[b] - counts[a]) : null;
  });
}

/** Round numbers from `low` to `high`, about `count` of them. */
export function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) {
    found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  }
  return found;
}

function thin(points, most) {
  if (points.length <= most) return points;
  const size = points.length / most, found = [];
  for (let i = 0; i < most; i++) {
    const part = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    const values = part.filter((point) => known(point[1]));
    const mean = values.reduce((sum, point) => sum + point[1], 0) / values.length;
    found.push([part[0][0], values.length ? mean : null]);
  }
  return found;
}

function path(points, x, y) {
  let text = "", pen = "M";
  for (const [at, value] of points) {
    if (!known(value)) { pen = "M"; continue; }
    text += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

/**
 * A chart in `container`. `series`: [{column, label, tone, format, right, plain, thin}]; `band` is the column of
 * a spread around the first. `zero` begins the axis at 0, `unit` stands behind the newest value, `wait` says what is awaited;
 * `optional`: without values there is no chart. `x` names what the steps are, `dots` marks each of them.
 */
export class Chart {
  constructor(container, options) {
    this.options = { height: 150, format: number, series: [], x: "step", ...options };
    this.container = container;
    if (this.options.x === "step") BY_STEP.add(this);
    this.columns = {};
    this.value = el("span", { class: "value" });
    this.body = el("div", { class: "plot" });
    this.keys = el("div", { class: "keys" });
    container.replaceChildren(
      el("div", { class: "charthead" }, el("h2", { title: options.hint }, options.title), this.value), this.keys, this.body);
    whenWidened(this.body, () => this.draw());
  }

  update(columns) {
    this.columns = columns;
    this.draw();
  }

  draw() {
    const { series, wait, format, unit } = this.options;
    const steps = this.columns.step ?? [];
    const shown = series.filter((line) => (this.columns[line.column] ?? []).some(known));
    this.rule = () => {};
    this.container.hidden = Boolean(this.options.optional) && !shown.length;
    if (!shown.length) {
      this.value.textContent = "";
      this.keys.replaceChildren();
      this.body.replaceChildren(el("p", { class: "empty" }, steps.length && this.options.none ? this.options.none : wait));
      return;
    }
    const newest = this.columns[shown[0].column].findLast(known);
    this.value.textContent = (shown[0].format ?? format)(newest) + (unit ? ` ${unit}` : "");
    const band = this.options.band && (this.columns[this.options.band] ?? []).some(known);
    this.keys.replaceChildren(...(series.length > 1 || band ? shown.map((line) => el("span", { class: "key" },
      el("i", { class: line.tone }), line.label)) : []), ...(band ? [el("span", { class: "key" },
      el("i", { class: `faint ${shown[0].tone}` }), "± standard deviation")] : []));
    if (this.body.clientWidth > 80) this.body.replaceChildren(this.picture(steps, shown));
  }

  picture(steps, shown) {
    const { height, band, zero, format, title } = this.options;
    const width = this.body.clientWidth, axes = {};
    const right = shown.some((line) => line.right) ? 40 : MARGIN.right;
    const first = steps[0], last = Math.max(steps.at(-1), first + 1);
    const x = (step) => MARGIN.left + ((step - first) / (last - first)) * (width - MARGIN.left - right);
    const spread = band && this.columns[band] ? this.columns[band] : null;
    for (const side of [false, true]) {
      const values = shown.filter((line) => Boolean(line.right) === side).flatMap((line) => this.columns[line.column]);
      if (spread && !side) {
        this.columns[shown[0].column].forEach((mean, i) => {
          if (known(mean) && known(spread[i])) values.push(mean - spread[i], mean + spread[i]);
        });
      }
      axes[side] = this.axis(values.filter(known), zero || side, side);
    }
    const y = (line) => (value) => {
      const { low, high } = axes[Boolean(line.right)];
      return height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    };
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${title}, ${this.options.x}s ${first} to ${steps.at(-1)}` });
    const rows = ticks(axes[false].low, axes[false].high, 3);
    const digits = Math.max(2, Math.ceil(-Math.log10(rows[1] - rows[0]) + 0.1) || 0);
    for (const tick of rows) {
      const at = y({})(tick);
      picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - right, y1: at, y2: at }),
        svg("text", { class: "tick", x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" },
          (shown.find((line) => !line.right)?.format ?? format)(tick, digits)));
    }
    const onRight = shown.find((line) => line.right);
    for (const tick of onRight ? ticks(axes[true].low, axes[true].high, 2) : []) {
      picture.append(svg("text", { class: `tick ${onRight.tone}`, x: width - right + 6, y: y(onRight)(tick) + 4 },
        (onRight.format ?? format)(tick, 2)));
    }
    for (const tick of ticks(first, steps.at(-1), Math.max(2, width / 130)).filter(Number.isInteger)) {
      picture.append(svg("text", { class: "tick", x: x(tick), y: height - 4, "text-anchor": "middle" }, tick));
    }
    if (spread) picture.append(this.bandOf(steps, shown[0], spread, x, y(shown[0]), width));
    for (const line of shown) this.lineOf(picture, steps, line, x, y(line), width);
    this.listen(picture, steps, shown, x, y, width, height);
    return picture;
  }

  axis(values, zero) {
    if (!values.length) return { low: 0, high: 1 };
    let low = Math.min(...thinned(values)), high = Math.max(...thinned(values));
    if (zero) low = Math.min(0, low);
    if (high - low < 1e-9) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!zero || low < 0) low -= pad; }
    const pad = (high - low) * 0.06;
    return { low: zero && low === 0 ? 0 : low - pad, high: high + pad };
  }

  bandOf(steps, line, spread, x, y, width) {
    const means = smooth(this.columns[line.column]), sizes = smooth(spread);
    const ends = (sign) => thin(steps.map((step, i) =>
      [step, known(means[i]) && known(sizes[i]) ? means[i] + sign * sizes[i] : null]), width).filter((point) => known(point[1]));
    const upper = ends(1), lower = ends(-1).reverse();
    return svg("path", { class: `band ${line.tone}`, d: `${path([...upper, ...lower], x, y)}Z` });
  }

  lineOf(picture, steps, line, x, y, width) {
    const values = this.columns[line.column], pairs = (of) => thin(steps.map((step, i) => [step, of[i]]), width * 2);
    const smoothed = line.plain ? values : smooth(values);
    if (smoothed !== values && !line.thin) picture.append(svg("path", { class: `line raw ${line.tone}`, d: path(pairs(values), x, y) }));
    picture.append(svg("path", { class: `line ${line.thin ? "thin " : ""}${line.tone}`, d: path(pairs(smoothed), x, y) }));
    const marked = steps.length === 1 || (this.options.dots && steps.length < width / 12);
    if (marked) steps.forEach((step, i) => known(values[i]) && picture.append(svg("circle", { class: `dot ${line.tone}`, cx: x(step), cy: y(values[i]), r: 3 })));
  }

  listen(picture, steps, shown, x, y, width, height) {
    const ruler = svg("line", { class: "ruler", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    picture.append(ruler);
    this.rule = (step) => {
      ruler.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) { ruler.setAttribute("x1", x(step)); ruler.setAttribute("x2", x(step)); }
    };
    const rule = (step) => { for (const chart of this.options.x === "step" ? BY_STEP : [this]) chart.rule(step); };
    picture.addEventListener("pointermove", (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      let near = 0;
      steps.forEach((step, i) => { if (Math.abs(x(step) - at) < Math.abs(x(steps[near]) - at)) near = i; });
      rule(steps[near]);
      const lines = shown.map((line) =>
        `${line.label ?? this.options.title} ${(line.format ?? this.options.format)(this.columns[line.column][near])}`);
      const spread = this.options.band && this.columns[this.options.band]?.[near];
      showTip(event, [`${this.options.x} ${steps[near]}`, ...lines, ...(known(spread) ? [`spread ± ${number(spread)}`] : [])]);
    });
    picture.addEventListener("pointerleave", () => { rule(null); hideTip(); });
  }
}

/** No more than some thousand values: Math.min takes its arguments from the stack. */
function thinned(values) {
  if (values.length <= 5000) return values;
  let low = values[0], high = values[0];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}
