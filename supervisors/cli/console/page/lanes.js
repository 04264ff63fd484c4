// Who did what when: a row for each process, bars by activity, bubbles pale and named, steps as marks above.

import { byId, el, svg, say, share, duration, empty, showTip, hideTip, whenWidened } from "./elements.js";
import { ticks } from "./charts.js";

const ROW = 26, TOP = 20, BOTTOM = 20, STEPS = [3, 6, 12, 24];
const BESIDE = new Set(["pull"]);
const BUBBLES = new Set(["idle", "wait"]);
const SHOWN = ["generate", "train", "publish", "pull", "score", "episode", "answer", "checkpoint", "asleep"];

/** What a bar is, in words. */
export function called(bar, lane) {
  const [name, , , , , missing] = bar;
  if (name === "wait") return missing ? `waits for ${missing} prompts` : "waits for samples";
  if (name === "idle") return lane.startsWith("rollout") ? "idle: nothing to generate" : "idle: nobody asks";
  return name;
}

export class Lanes {
  constructor() {
    this.data = null;
    this.steps = 6;
    byId("lane-choice").replaceChildren(...STEPS.map((steps) => el("button", { type: "button",
      "aria-pressed": String(steps === this.steps), on: { click: () => this.choose(steps) } }, `${steps} steps`)));
    whenWidened(byId("lanes"), () => this.draw());
  }

  choose(steps) {
    this.steps = steps;
    [...byId("lane-choice").children].forEach((button, i) => button.setAttribute("aria-pressed", String(STEPS[i] === steps)));
    this.draw();
  }

  update(data, files) {
    this.data = data;
    this.files = files;
    this.draw();
  }

  /** Where the last steps begin, in seconds of the data. */
  begin() {
    const marks = this.data.steps;
    return marks.length > this.steps ? marks[marks.length - this.steps][1] : 0;
  }

  draw() {
    const room = byId("lanes");
    if (!this.data) return;
    if (!this.data.lanes.length) {
      say("lane-span", "");
      byId("lane-legend").replaceChildren();
      room.replaceChildren(empty(this.files ? "Waits for the first second of work: workers and trainer then say what they do."
        : "Lanes are drawn from the run's trace.json, which is not on this machine."));
      return;
    }
    const width = room.clientWidth;
    if (width < 120) return;
    const longest = Math.max(...this.data.lanes.map((lane) => lane.name.length));
    const label = Math.min(0.4 * width, Math.max(width < 600 ? 92 : 132, 44 + 7 * longest)), begin = this.begin(), end = Math.max(this.data.end_s, begin + 0.001);
    const x = (second) => label + ((second - begin) / (end - begin)) * (width - label - 8);
    const height = TOP + this.data.lanes.length * ROW + BOTTOM;
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Lanes" });
    picture.append(svg("defs", {}, svg("pattern", { id: "bubble", width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, svg("rect", { class: "bubble-ground", width: 6, height: 6 }),
    svg("line", { class: "bubble-line", x1: 0, x2: 0, y1: 0, y2: 6 }))));
    this.data.lanes.forEach((lane, row) => this.lane(picture, lane, TOP + row * ROW, x, label, begin, width));
    this.marks(picture, x, begin, end, height, width);
    room.replaceChildren(picture);
    const seen = new Set(this.data.lanes.flatMap((lane) => lane.bars.map((bar) => bar[0])));
    byId("lane-legend").replaceChildren(...SHOWN.filter((name) => seen.has(name)).map((name) =>
      el("span", { class: "key" }, el("i", { class: `fill-${name}` }), name)),
    el("span", { class: "key" }, el("i", { class: "fill-bubble" }), "bubble: idle, waiting"));
    say("lane-span", `the last ${duration(end - begin)}; busy shares are of ${duration(this.data.end_s)}`);
  }

  lane(picture, lane, top, x, label, begin, width) {
    const right = width - 8, from = Math.max(label, x(lane.bars[0][1]));
    picture.append(svg("text", { class: "lane-name", x: 0, y: top + 16 }, lane.name),
      svg("text", { class: "lane-share", x: label - 8, y: top + 16, "text-anchor": "end" }, share(lane.busy)),
      svg("rect", { class: "lane-ground", x: from, y: top + 3, width: Math.max(0, right - from), height: ROW - 6 }));
    for (const [start, end] of lane.gaps) {
      if (end > begin) {
        const a = Math.max(label, x(start));
        picture.append(svg("rect", { class: "absent", x: a, y: top + 3, width: Math.max(0, x(end) - a), height: ROW - 6 }));
      }
    }
    for (const bar of [...lane.bars].sort((a, b) => BESIDE.has(a[0]) - BESIDE.has(b[0]))) {
      const [name, start, end, step, version] = bar;
      if (end <= begin) continue;
      const a = Math.max(label, x(start)), size = Math.max(0.6, x(end) - a), beside = BESIDE.has(name);
      const bubble = BUBBLES.has(name);
      if (bubble && size < 1) continue;
      const piece = svg("rect", { class: `bar ${bubble ? "bubble" : `fill-${SHOWN.includes(name) ? name : "other"}`}`,
        x: a.toFixed(1), y: top + (beside ? ROW - 8 : 3), width: size.toFixed(1), height: beside ? 5 : ROW - 6,
        "data-activity": name });
      piece.addEventListener("pointermove", (event) => showTip(event, [`${lane.name}: ${called(bar, lane.name)}`,
        duration(end - start), ...(step === null ? [] : [`step ${step}`]), ...(version === null ? [] : [`version ${version}`])]));
      piece.addEventListener("pointerleave", hideTip);
      picture.append(piece);
      const words = bubble ? (name === "wait" ? "waits" : "idle") : name === "asleep" ? name : "";
      if (words && size > words.length * 6.2 + 14) {
        picture.append(svg("text", { class: "bubble-name", x: a + size / 2, y: top + 16.5, "text-anchor": "middle" }, words));
      }
    }
  }

  marks(picture, x, begin, end, height, width) {
    let written = -100;
    for (const [step, start] of this.data.steps.filter((mark) => mark[1] >= begin)) {
      picture.append(svg("line", { class: "mark", x1: x(start), x2: x(start), y1: TOP - 5, y2: height - BOTTOM }));
      if (x(start) - written > 54 && x(start) < width - 46) {
        picture.append(svg("text", { class: "tick", x: x(start) + 3, y: 11 }, `step ${step}`));
        written = x(start);
      }
    }
    for (const tick of ticks(0, end - begin, Math.max(2, width / 160))) {
      const at = x(begin + tick);
      picture.append(svg("text", { class: "tick", x: at, y: height - 4, "text-anchor": at > width - 30 ? "end" : "middle" }, `${Number(tick.toFixed(3))} s`));
    }
  }
}
