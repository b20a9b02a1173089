// A training run, whose new events are asked for once a second while the page is seen.

import { draw } from "./chart.js";

const EVERY = 1000;
const POINTS = 1000;
const NOTES = 50;

const at = (id) => document.getElementById(id);
const steps = [];
const validations = [];
const notes = [];
let next = 0;
let started = null;

/** What an event says that is no number of a chart; `null` of others. */
function note(event) {
  switch (event.event) {
    case "refused": return `step ${event.step}: ${event.why}; its update is left out`;
    case "rolled_back": return `back at the checkpoint of step ${event.step}`;
    case "checkpoint": return `checkpoint of step ${event.step}`;
    case "sample": return `step ${event.step}, sample: ${event.text}`;
    case "expert_collapse": return `step ${event.step}: the experts of ${event.used.layer} have collapsed`;
    case "note": return event.text;
    case "exported": return `the model is in ${event.folder}`;
    default: return null;
  }
}

function take(event) {
  if (event.event === "started") started = event;
  if (event.event === "step") steps.push(event);
  if (event.event === "validation") validations.push(event);
  const text = note(event);
  if (text !== null) notes.unshift(text);
  notes.length = Math.min(notes.length, NOTES);
}

/** At most some of the points, evenly, the last among them. */
function thinned(points) {
  const every = Math.ceil(points.length / POINTS);
  return points.filter((_, i) => (points.length - 1 - i) % every === 0);
}

function chart(id, series) {
  const points = series.flatMap((s) => s.points);
  const x0 = Math.min(...points.map((p) => p[0]));
  const x1 = Math.max(...points.map((p) => p[0]));
  draw(at(id), { series, x0, x1, axis: `steps ${x0} to ${x1}`, none: "no step yet" });
}

function left(seconds) {
  const [h, m, s] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

function show() {
  const last = steps.at(-1);
  at("model").className = "";
  at("model").textContent = started ? `${started.parameters.toLocaleString("en")} parameters, ${started.tokens.toLocaleString("en")} tokens` : "";
  const of = (name, factor = 1) => thinned(steps.map((step) => [step.step, step[name] * factor]));
  chart("loss", [
    { name: "training", points: of("loss") },
    { name: "validation", points: thinned(validations.map((v) => [v.step, v.loss])), dots: true },
  ]);
  chart("norm", [{ name: "norm", points: of("gradient_norm") }]);
  chart("rate", [{ name: "rate", points: of("learning_rate", 1e6) }]);
  chart("speed", [{ name: "tokens", points: of("tokens_per_second", 1e-3) }]);
  if (last) {
    const best = validations.length ? Math.min(...validations.map((v) => v.loss)).toFixed(4) : "none yet";
    const rows = [
      ["Step", `${last.step} of ${last.steps}`],
      ["Loss", last.loss.toFixed(4)],
      ["Best validation", best],
      ["Tokens/s", Math.round(last.tokens_per_second).toLocaleString("en")],
      ["MFU", last.mfu === null ? "unknown" : `${(100 * last.mfu).toFixed(1)}%`],
      ["Memory", `${(last.memory_bytes / 2 ** 30).toFixed(2)} GiB`],
      ["Epoch", last.epoch.toFixed(2)],
      ["Left", left(last.seconds_left)],
    ];
    at("numbers").replaceChildren(...rows.map(([name, value]) => {
      const [both, term, what] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      [term.textContent, what.textContent] = [name, value];
      both.append(term, what);
      return both;
    }));
    document.title = `${last.step}/${last.steps} ${last.loss.toFixed(3)}`;
  }
  at("notes").replaceChildren(...notes.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

for (;;) {
  if (!document.hidden) {
    try {
      for (;;) {
        const response = await fetch(`/events?from=${next}`, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
        if (!response.ok) throw new Error(String(response.status));
        const { events, next: behind } = await response.json();
        events.forEach(take);
        next = behind;
        if (events.length === 0) break;
      }
      show();
    } catch {
      at("model").textContent = "the run does not answer: it has ended, or its machine cannot be reached";
      at("model").className = "wrong";
    }
  }
  await new Promise((done) => setTimeout(done, EVERY));
}
