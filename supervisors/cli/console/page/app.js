// The page of the console: takes the sections of the feed and hands each to what shows it.
//
//     data ─▶ show ─┬─ a run that is over: look again now and then whether it goes on
//                   └─ else feed (server-sent events) ─▶ show; silence or a broken connection ─▶ say so, connect again

import { number, share } from "./elements.js";
import { Chart } from "./charts.js";
import { Lanes } from "./lanes.js";
import { Samples, bannerLost, showDevices, showEvents, showHead, showStalls, showWorkers } from "./panels.js";

const SECTIONS = ["head", "rows", "lanes", "workers", "devices", "samples", "stalls", "events"];
const SILENCES = 3; // as many signs of life may be missing
const AGAIN_MS = [500, 1000, 2000, 5000, 10000];
const OVER_MS = 15000;

const seen = {}; // section → its newest data
let columns = {};
const wait = "Waits for the first step to be committed.";
const line = (column, label, tone, more = {}) => ({ column, label, tone, ...more });
const chart = (id, options) => new Chart(document.getElementById(id), { wait, ...options });

const charts = [
  chart("reward", { title: "Reward", height: 220, band: "reward_std", series: [line("reward_mean", "mean", "orange")],
    none: "No sample of these steps had a reward.", hint: "Mean reward of the samples that were trained; the band is their spread" }),
  chart("throughput", { title: "Throughput", height: 220, zero: true, unit: "tokens/s",
    series: [line("tokens_per_s", "tokens/s", "blue"), line("samples_per_s", "samples/s", "green", { right: true, thin: true })] }),
];
const small = [
  { title: "Response length", zero: true, unit: "tokens", series: [line("response_tokens_mean", "mean", "blue"),
    line("response_tokens_max", "longest", "pale"), line("truncated_fraction", "cut", "red", { right: true, format: share })] },
  { title: "Loss", series: [line("loss", "loss", "purple")] },
  { title: "KL to the reference", zero: true, series: [line("kl", "KL", "teal")] },
  { title: "Entropy", zero: true, unit: "nats", series: [line("entropy", "entropy", "green")] },
  { title: "Gradient norm", zero: true, series: [line("grad_norm", "norm", "brown")] },
  { title: "Idle", zero: true, format: share, hint: "Share of the engines' time without work, and of the trainer's step that it waited",
    series: [line("rollout_idle_fraction", "rollout", "blue"), line("trainer_idle_fraction", "trainer", "orange")] },
  { title: "Engine and trainer disagree", zero: true, hint: "Mean distance between their log-probabilities of a token",
    series: [line("engine_mismatch", "distance", "red")] },
  { title: "Groups that teach nothing", zero: true, format: share, hint: "Groups whose rewards are all equal",
    series: [line("degenerate_fraction", "equal groups", "brown")] },
];
for (const options of small) {
  const place = document.createElement("div");
  place.className = "chart";
  document.getElementById("multiples").append(place);
  charts.push(new Chart(place, { wait, format: number, height: 120, ...options }));
}
const lanes = new Lanes();
const samples = new Samples(async (step) => {
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
  if (section === "rows") for (const one of charts) one.update(columns);
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
  bannerLost(`${why}. What is shown is ${tries > 1 ? "old by now" : "as it was"}; connecting again…`);
  setTimeout(begin, pause);
}

async function begin() {
  const why = await load();
  if (why) retry(why);
  else if (seen.head.feed === "over") setTimeout(begin, OVER_MS);
  else follow();
}

begin();
