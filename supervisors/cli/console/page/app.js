// The page of the console: takes the sections of the feed and hands each to what shows it.
//
//     data ─▶ show ─┬─ a run that is over: look again now and then whether it goes on
//                   └─ else feed (server-sent events) ─▶ show; silence or a broken connection ─▶ say so, connect again
//     a page that headrace plot has written holds its data, and asks nobody

import { el, byId, number, share } from "./elements.js";
import { Chart } from "./charts.js";
import { Lanes } from "./lanes.js";
import { Samples, bannerLost, showDevices, showEvents, showHead, showStalls, showWorkers } from "./panels.js";

const SECTIONS = ["head", "rows", "evaluations", "lanes", "workers", "devices", "samples", "stalls", "events"];
const SILENCES = 3; // as many signs of life may be missing
const AGAIN_MS = [500, 1000, 2000, 5000, 10000];
const OVER_MS = 15000;
const QUIET_TRIES = 2; // a console on a busy machine answers the next try: nobody is to be alarmed
const CHOSEN = "headrace metrics"; // where the browser keeps which further metrics are shown

const exported = JSON.parse(document.getElementById("exported")?.textContent ?? "null");
const seen = {}; // section → its newest data
let columns = {};
const wait = "Waits for the first step to be committed.";
const line = (column, label, tone, more = {}) => ({ column, label, tone, ...more });
const chart = (id, options) => new Chart(document.getElementById(id), { wait, ...options });

const charts = [
  chart("reward", { title: "Reward", height: 220, band: "reward_std", series: [line("reward_mean", "mean", "orange"), line("reward_true_mean", "true reward", "teal", { plain: true })],
    none: "No sample of these steps had a reward.", hint: "Mean reward of the samples that were trained; the band is their spread" }),
  chart("throughput", { title: "Throughput", height: 220, zero: true, unit: "tokens/s",
    series: [line("tokens_per_s", "tokens/s", "blue"), line("samples_per_s", "samples/s", "green", { right: true, thin: true })] }),
];
const small = [
  { title: "Response length", zero: true, unit: "tokens", series: [line("response_tokens_mean", "mean", "blue"),
    line("response_tokens_max", "longest", "pale"), line("truncated_fraction", "cut", "red", { right: true, format: share })] },
  { title: "Loss", series: [line("loss", "loss", "purple")] },
  { title: "KL to the reference", zero: true, series: [line("kl", "KL", "teal")], none: "The job has no reference model." },
  { title: "Entropy", zero: true, unit: "nats", series: [line("entropy", "entropy", "green")] },
  { title: "Gradient norm", zero: true, series: [line("grad_norm", "norm", "brown")] },
  { title: "Idle", zero: true, format: share, hint: "Share of the engines' time without work, and of the trainer's step that it waited",
    series: [line("rollout_idle_fraction", "rollout", "blue"), line("trainer_idle_fraction", "trainer", "orange")] },
  { title: "Preemptions", optional: true, zero: true, hint: "Times that an engine had no memory left for the keys and values of a sequence",
    series: [line("preemptions", "times", "red")] },
  { title: "Engine and trainer disagree", zero: true, hint: "Mean distance between their log-probabilities of a token, in samples of the trained version",
    series: [line("engine_mismatch", "distance", "red")], none: "No sample of these steps was of the trained version." },
  { title: "Staleness", zero: true, hint: "The same distance for samples of older versions: what the updates since then have changed",
    series: [line("stale_mismatch", "distance", "orange")], none: "No stale sample was trained." },
  { title: "Critic: explained variance", optional: true, hint: "1: the critic knows the returns; 0: no more than a constant would",
    series: [line("explained_variance", "explained", "teal")] },
  { title: "KL of a response", optional: true, zero: true, unit: "nats", hint: "Summed over each response, as algorithm.kl_coefficient counts it",
    series: [line("kl_per_response", "KL", "teal")] },
  { title: "Groups that teach nothing", zero: true, format: share, hint: "Groups whose rewards are all equal",
    series: [line("degenerate_fraction", "equal groups", "brown")] },
];
const smallChart = (options) => {
  const place = el("div", { class: "chart" });
  byId("multiples").append(place);
  const made = new Chart(place, { wait, height: 120, ...options });
  return Object.assign(made, { place });
};
for (const options of small) charts.push(smallChart(options));
const evaluation = chart("evaluation", { title: "Evaluation", height: 160, x: "version", optional: true, dots: true, format: (value) => number(value),
  hint: "On held-out prompts. avg@k: mean reward of k responses; pass@k: one of k passes" });

// ------------------------------------------------------------ metrics that a reader chooses

const TONES = ["blue", "orange", "green", "purple", "brown", "red", "pale"];
const ofParts = (name) => /^reward_.+_mean$/.test(name) && name !== "reward_true_mean";
const usual = new Set(["step", "seconds", "samples", "policy_version", "reward_std", ...charts.flatMap((one) => one.options.series.map((line) => line.column))]);
let parts = null, chosen = new Set(stored()), further = {};

function stored() {
  try { return JSON.parse(localStorage.getItem(CHOSEN) ?? "[]"); } catch { return []; }
}

function choose(name, on) {
  chosen[on ? "add" : "delete"](name);
  try { localStorage.setItem(CHOSEN, JSON.stringify([...chosen])); } catch { /* a page from a disk may not be allowed to */ }
  drawChosen();
}

/** One chart for all parts of the reward, and one for each further metric that was chosen. */
function drawChosen() {
  const names = Object.keys(columns).filter((name) => columns[name].some((value) => value !== null));
  const rewards = names.filter(ofParts).filter((name) => name !== "reward_mean");
  if (rewards.length && !parts) parts = smallChart({ title: "Rewards, part by part" });
  if (parts) {
    parts.options.series = rewards.map((name, i) => line(name, name.slice(7, -5), TONES[i % TONES.length]));
    parts.update(columns);
  }
  const offered = names.filter((name) => !usual.has(name) && !rewards.includes(name)).sort();
  byId("more").hidden = !offered.length;
  if (byId("more-choice").dataset.offered !== offered.join()) {
    byId("more-choice").dataset.offered = offered.join();
    byId("more-choice").replaceChildren(...offered.map((name) => el("label", {}, el("input", { type: "checkbox", checked: chosen.has(name),
      on: { change: (event) => choose(name, event.target.checked) } }), name)));
  }
  for (const name of offered) {
    if (chosen.has(name)) (further[name] ??= smallChart({ title: name, series: [line(name, name, "blue")] })).update(columns);
    else if (further[name]) { further[name].place.remove(); delete further[name]; }
  }
}

function showEvaluations({ rows }) {
  const k = rows.at(-1)?.k ?? "k", table = { step: rows.map((row) => row.version), [`avg@${k}`]: rows.map((row) => row.avg_at_k) };
  for (const n of Object.keys(rows.at(-1)?.pass_at_k ?? {})) if (n !== "1" || k !== 1) table[`pass@${n}`] = rows.map((row) => row.pass_at_k[n] ?? null);
  evaluation.options.series = Object.keys(table).slice(1).map((name, i) => line(name, name, ["orange", "blue", "green", "purple", "brown", "red", "pale"][i % 7], { plain: true }));
  evaluation.update(table);
  byId("evaluation-card").hidden = !rows.length;
}
const lanes = new Lanes();
const samples = new Samples(async (step) => {
  if (exported) return exported.cards[step];
  const answer = await fetch(`samples?step=${step}`).catch(() => null);
  return answer?.ok ? answer.json() : null;
});

function addRows({ reset, columns: names, rows }) {
  if (reset) columns = Object.fromEntries(names.map((name) => [name, []]));
  const known = columns.step.at(-1) ?? -1;
  for (const row of rows) if (row[0] > known) names.forEach((name, i) => columns[name].push(row[i]));
}

function show(section, data) {
  if (section === "rows") addRows(data);
  else seen[section] = data;
  const head = seen.head ?? { files: true, settings: {}, feed: "" };
  const over = head.feed === "over";
  if (section === "rows") { for (const one of charts) one.update(columns); drawChosen(); }
  if (section === "evaluations") showEvaluations(data);
  if ((section === "rows" || section === "head") && seen.head) showHead(seen.head, columns);
  if (section === "lanes") lanes.update(data, head.files);
  if (section === "samples") samples.update(data.steps, head.files, over);
  if (seen.workers && (section === "workers" || section === "head")) showWorkers(seen.workers, over);
  if (seen.stalls && (section === "stalls" || section === "head")) showStalls(seen.stalls, over);
  if (section === "devices") showDevices(data);
  if (section === "events") showEvents(data);
}

function showAll(data) {
  for (const section of SECTIONS) show(section, data[section]);
  document.body.dataset.shown = seen.head.feed; // for whoever drives the page
}

async function load() {
  const answer = await fetch("data").catch(() => null);
  if (answer === null) return "The console does not answer: has the command been ended?";
  if (!answer.ok) return await answer.text();
  showAll(await answer.json());
  return "";
}

// ------------------------------------------------------------ the feed

let tries = 0;

function follow() {
  const feed = new EventSource("feed");
  let heard = performance.now(), watch = 0;
  const end = () => { feed.close(); clearInterval(watch); };
  const note = () => { heard = performance.now(); tries = 0; };
  for (const section of SECTIONS) {
    feed.addEventListener(section, (event) => {
      note();
      show(section, JSON.parse(event.data));
      if (seen.head?.feed === "over" && section === "head") { end(); setTimeout(begin, OVER_MS); }
    });
  }
  feed.addEventListener("alive", note);
  feed.onerror = () => { end(); retry("The feed was cut off"); };
  watch = setInterval(() => {
    const allowed = SILENCES * 1000 * (seen.head?.alive_s ?? 5);
    if (performance.now() - heard > allowed) { end(); retry("The feed has gone silent"); }
  }, 1000);
}

function retry(why) {
  const pause = AGAIN_MS[Math.min(tries++, AGAIN_MS.length - 1)];
  if (tries > QUIET_TRIES) bannerLost(`${why}. The run does not depend on it; what is shown is old by now. Connecting again…`);
  setTimeout(begin, pause);
}

async function begin() {
  if (exported) return showAll(exported);
  const why = await load();
  if (why) retry(why);
  else if (seen.head.feed === "over") setTimeout(begin, OVER_MS);
  else follow();
}

begin();
