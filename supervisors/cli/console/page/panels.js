// The parts that are text: header, workers, samples, waits, events. Each says what is awaited where there is nothing.

import { byId, el, say, number, share, duration, clock, empty } from "./elements.js";

const at = (settings, ...keys) => keys.map((key) => settings[key]).find((value) => value !== undefined && value !== null);
const FEED = { live: "live", over: "over", lost: "from files", files: "files only", gone: "console does not answer" };

/** What the job is about, in a line. */
function about(head) {
  const { settings } = head;
  const model = at(settings, "model.path") ?? (settings["model.source"] ? `${settings["model.source"]} model` : null);
  const data = at(settings, "data.task", "data.path");
  const rule = at(settings, "algorithm.name");
  const group = settings["algorithm.group_size"];
  const mode = settings["sync.mode"], engine = settings["rollout.engine"];
  return [model, data, rule && (group ? `${rule}, groups of ${group}` : rule), mode && `mode ${mode}`, engine && `engine ${engine}`]
    .filter(Boolean).join(" · ");
}

export function showHead(head, columns) {
  say("job", head.job ?? "no job yet");
  document.title = `${head.step}${head.steps ? `/${head.steps}` : ""} ${head.job ?? "Headrace"}`;
  say("state", head.state || "starting");
  byId("state").className = `pill ${head.state === "failed" ? "bad" : head.state === "running" ? "good" : "plain"}`;
  showFeed(head.feed);
  say("about", about(head));
  const done = head.steps ? Math.min(1, head.step / head.steps) : 0;
  byId("done").style.width = `${100 * done}%`;
  say("steps", head.steps ? `${head.step} of ${head.steps} steps` : `${head.step} steps`);
  const running = head.state === "running" && head.feed !== "over";
  say("eta", running && head.eta_s !== null ? `about ${duration(head.eta_s)} left` : head.state === "finished" ? "all steps done" : "");
  const last = (name) => columns[name]?.at(-1) ?? null;
  const recent = (columns.reward_mean ?? []).filter((value) => value !== null).slice(-5);
  const reward = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : null;
  const facts = [
    ["reward, last 5", number(reward)],
    ["tokens / s", number(last("tokens_per_s"), 0)],
    ["seconds a step", number(last("seconds"), 2)],
    ["policy version", number(head.policy_version ?? null)],
    ["staleness", `${number(head.staleness_max ?? null)}${head.staleness_bound === null ? "" : ` of ${head.staleness_bound}`}`],
    ["idle: rollout, trainer", `${share(last("rollout_idle_fraction"))}, ${share(last("trainer_idle_fraction"))}`],
    ["restarts", number(head.restarts ?? null)],
    ["dropped, last step", number(head.samples_dropped ?? null)],
  ];
  const loud = { restarts: head.restarts > 0, "dropped, last step": head.samples_dropped > 0 };
  byId("facts").replaceChildren(...facts.map(([name, value]) =>
    el("div", { class: loud[name] ? "loud" : null }, el("dt", {}, name), el("dd", {}, value))));
  showBanner(head);
}

export function showFeed(feed) {
  say("feed", FEED[feed] ?? feed);
  byId("feed").className = `pill ${feed === "live" ? "good pulse" : feed === "gone" ? "warn" : "plain"}`;
}

function showBanner(head) {
  const lost = `prompts lost: ${head.prompts_lost}, samples trained twice: ${head.samples_trained_twice}`;
  const said = [
    head.state === "failed" ? ["bad", `The run has failed: ${head.reason || "its log says why"}`] : null,
    head.prompts_lost > 0 || head.samples_trained_twice > 0 ? ["bad", `This must never be: ${lost}. headrace doctor --run looks into it.`] : null,
    head.feed === "lost" && head.state === "running" ? ["note", `The run's control socket does not answer (${head.feed_why}). What is shown comes from its files, which are read every second.`] : null,
    head.waiting_for ? ["note", `Waiting for ${head.waiting_for}`] : null,
  ].find(Boolean);
  byId("banner").hidden = !said;
  if (said) {
    byId("banner").className = `banner ${said[0]}`;
    say("banner", said[1]);
  }
}

export function bannerLost(text) {
  byId("banner").hidden = false;
  byId("banner").className = "banner warn";
  say("banner", text);
  showFeed("gone");
}

// ------------------------------------------------------------ workers

export function showWorkers(rows, over) {
  if (over) rows = rows.map((row) => ({ ...row, state: row.state === "running" ? "ended" : row.state }));
  const running = rows.filter((row) => row.state === "running").length;
  say("worker-count", over ? `${rows.length}` : rows.length ? `${running} running of ${rows.length}` : "");
  if (!rows.length) {
    byId("workers").replaceChildren(empty("Waits for the first rollout worker to register: its engine is loading the model."));
    return;
  }
  const head = ["worker", "state", "node", "version", "samples", "tokens/s", "restarts"];
  const samples = (row) => (over || row.running === undefined ? "–" : `${number(row.running)} + ${number(row.queued)}`);
  const cells = (row) => [row.name, row.state || "–", row.node || "–", number(row.version), samples(row),
    number(over ? null : row.tokens_per_s, 0), number(row.restarts)];
  const hint = { samples: "running + queued" };
  const tone = (row) => (row.state === "running" ? "good" : row.state === "lost" ? "bad" : row.state === "ended" || row.state === "stopped" ? "plain" : "warn");
  byId("workers").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { title: hint[name] }, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", { title: row.why || null }, ...cells(row).map((cell, i) =>
      el("td", {}, i === 1 ? el("span", { class: `pill small ${tone(row)}` }, cell) : cell)))))));
}

// ------------------------------------------------------------ devices

/** Who has which device; the card is there only where a machine has some. */
export function showDevices(rows) {
  byId("device-card").hidden = !rows.length;
  const free = rows.filter((row) => !row.processes.length).length;
  say("device-count", `${free} free of ${rows.length}`);
  const head = ["node", "device", "processes"];
  byId("devices").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", {}, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...[row.node, row.device, row.processes.join(", ") || "free"].map((cell) => el("td", {}, cell)))))));
}

// ------------------------------------------------------------ waits

export function showStalls(data, over) {
  const rows = [
    ...data.rows.map((row) => [`${row.waiter} waits for ${row.waits_for}`, row.what, row.since_s]),
    ...(data.asked ? [] : data.health.map((row) => [row.process, "a wait that was open when it last reported", row.oldest_wait_s])),
  ];
  say("stall-count", rows.length ? `${rows.length}` : "");
  const why = over ? "The run is over: nobody waits." : data.asked ? "Nobody has waited for longer than a second."
    : "Waits are asked of the running system, which does not answer now.";
  byId("stalls").replaceChildren(...(rows.length ? rows.map(([who, what, since]) => el("div", { class: "stall" },
    el("span", { class: "since" }, duration(since)), el("div", {}, el("strong", {}, who), el("div", { class: "dim" }, what)))) : [empty(why)]));
}

// ------------------------------------------------------------ events

export function showEvents(data) {
  const said = [...data.rows].reverse();
  const told = data.rows.map((row) => row.text);
  const fresh = [...data.messages].reverse().filter((text) => !told.includes(text)).slice(0, 8);
  say("event-count", said.length ? `${said.length}, newest first` : "");
  const line = (row) => el("li", { class: row.level }, el("time", {}, clock(row.time_s)),
    el("span", {}, row.text), row.count > 1 ? el("span", { class: "times" }, `× ${row.count}`) : null);
  const items = [...fresh.map((text) => line({ level: "note", text, count: 1 })), ...said.map(line)];
  byId("events").replaceChildren(...(items.length ? items : [empty("Nothing yet: starts, losses, drops and checkpoints come here.")]));
}

// ------------------------------------------------------------ samples

const FINISH = { cut: "cut at max_tokens", max_tokens: "cut at max_tokens", turn_tokens: "cut at turn_tokens",
  episode_tokens: "cut at episode_tokens", request: "cut at its request's limit", context: "ended at the context length",
  mid_turn: "ended by its agent in mid turn", turns_max: "ended at turns_max", episode_s: "ended at episode_s" };

function card(sample) {
  const text = (name, label, said) => (said ? el("div", { class: `text ${name}` }, el("h3", {}, label), el("pre", {}, said)) : null);
  return el("article", { class: "sample" },
    el("div", { class: "samplehead" }, el("span", { class: `pill small ${sample.chosen === "dropped" ? "bad" : "plain"} ${sample.chosen}` }, sample.chosen),
      el("strong", {}, `reward ${number(sample.reward)}`), el("span", { class: FINISH[sample.finish] ? "warned" : "dim" }, FINISH[sample.finish] ?? sample.finish),
      el("span", { class: "dim" }, `${number(sample.tokens)} tokens`), el("span", { class: "dim" }, `prompt ${sample.prompt}, sibling ${sample.sibling}`)),
    text("prompt_text", "prompt", sample.prompt_text),
    ...sample.turns.map((turn) => text(turn.role === "model" ? "response" : "environment", turn.title, turn.text)),
    text("answer", "answer", sample.answer),
    sample.reason ? el("p", { class: "warned" }, `dropped: ${sample.reason}`) : null);
}

/** Samples of one step: the newest, until somebody chooses another. */
export class Samples {
  constructor(load) {
    this.load = load;
    this.steps = [];
    this.chosen = null; // null: the newest
    this.shown = null;
    const go = (index) => this.choose(Math.max(0, Math.min(this.steps.length - 1, index)));
    byId("sample-back").addEventListener("click", () => go(this.index() - 1));
    byId("sample-on").addEventListener("click", () => go(this.index() + 1));
    byId("sample-newest").addEventListener("click", () => { this.chosen = null; this.show(); });
    byId("sample-range").addEventListener("input", (event) => go(Number(event.target.value)));
  }

  index() {
    const place = this.steps.indexOf(this.chosen);
    return place < 0 ? this.steps.length - 1 : place;
  }

  choose(index) {
    this.chosen = index === this.steps.length - 1 ? null : this.steps[index];
    this.show();
  }

  update(steps, files, over) {
    this.over = over;
    this.steps = steps;
    this.files = files;
    this.show();
  }

  async show() {
    const some = this.steps.length > 0, index = this.index(), step = this.steps[index];
    byId("sample-range").max = Math.max(0, this.steps.length - 1);
    byId("sample-range").value = Math.max(0, index);
    byId("sample-range").hidden = this.steps.length < 2;
    byId("sample-back").disabled = !some || index === 0;
    byId("sample-on").disabled = byId("sample-newest").disabled = !some || index === this.steps.length - 1;
    say("sample-step", some ? `of step ${step}` : "");
    if (!some) {
      byId("samples").replaceChildren(empty(this.files
        ? `${this.over ? "This run has kept none" : "Waits for the first step with samples"}; they come from samples.jsonl, which metrics.samples turns off.`
        : "Samples are read from the run's samples.jsonl, which is not on this machine."));
      this.shown = null;
      return;
    }
    if (this.shown === step) return;
    this.shown = step;
    const rows = await this.load(step);
    if (this.shown !== step) return;
    if (rows === null) this.shown = null; // it is tried again with the next news
    else byId("samples").replaceChildren(...rows.map(card));
  }
}
