// The engine at work, asked for twice a second while the page is seen.

import { draw } from "./chart.js";

const EVERY = 500;
const SIDE = 9;

export class Live {
  constructor(page) {
    this.page = page;
    this.at = (id) => page.getElementById(id);
    this.#run();
  }

  async #run() {
    for (;;) {
      if (!this.page.hidden) {
        try {
          const response = await fetch("/live", { cache: "no-store", signal: AbortSignal.timeout(10_000) });
          if (!response.ok) throw new Error(String(response.status));
          this.#show(await response.json());
        } catch {
          this.at("model").textContent = "the server does not answer";
        }
      }
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  #show({ model, context, engine }) {
    this.at("model").textContent = `${model}, context of ${context.toLocaleString("en")} tokens`;
    const { blocks, recent_steps: steps = [], recent_answers: answers = [], uptime_s: now = 0 } = engine;
    const hits = engine.prefix_queries ? `${((100 * engine.prefix_hits) / engine.prefix_queries).toFixed(0)}%` : "none yet";
    this.#numbers([
      ["Running", engine.running],
      ["Waiting", engine.waiting],
      ["Steps", engine.steps],
      ["Blocks used", blocks && `${blocks.used} of ${blocks.total}`],
      ["Prefix hits", hits],
      ["Preemptions", engine.preemptions],
    ]);
    if (blocks) this.#blocks(blocks);
    const timed = steps.filter((s) => s.floor_ms !== null);
    const last = steps.length ? [steps[0].at_s, steps.at(-1).at_s] : [0, 1];
    this.#chart("steps", last, now, "no step yet", [
      { name: "time", points: steps.map((s) => [s.at_s, s.ms]) },
      { name: "floor", points: timed.map((s) => [s.at_s, s.floor_ms]) },
    ]);
    this.#chart("batch", last, now, "no step yet", [
      { name: "tokens", points: steps.map((s) => [s.at_s, s.tokens]) },
      { name: "sequences", points: steps.map((s) => [s.at_s, s.sequences]) },
    ]);
    const ended = answers.length ? [answers[0].at_s, answers.at(-1).at_s] : [0, 1];
    const many = answers.filter((a) => a.tpot_ms !== null);
    const dots = (name, points) => [{ name, points, dots: true }];
    this.#chart("ttft", ended, now, "no answer yet", dots("ttft", answers.map((a) => [a.at_s, a.ttft_ms])));
    this.#chart("tpot", ended, now, "no answer yet", dots("tpot", many.map((a) => [a.at_s, a.tpot_ms])));
  }

  #chart(id, [x0, x1], now, none, series) {
    const ago = (at) => `${Math.max(0, now - at).toFixed(0)} s ago`;
    draw(this.at(id), { series, x0, x1, axis: `${ago(x0)} to ${ago(x1)}`, none });
  }

  #numbers(rows) {
    const parts = [];
    for (const [name, value] of rows) {
      if (value === undefined) continue;
      const term = this.page.createElement("dt");
      const what = this.page.createElement("dd");
      term.textContent = name;
      what.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
      const both = this.page.createElement("div");
      both.append(term, what);
      parts.push(both);
    }
    this.at("numbers").replaceChildren(...parts);
  }

  // A map that is too large, or that the busy engine did not give, becomes one bar.
  #blocks({ total, used, cached, map }) {
    const canvas = this.at("blocks");
    canvas.setAttribute("aria-label", `${used} of ${total} blocks used, ${cached} kept for prefixes`);
    const style = getComputedStyle(this.page.documentElement);
    const colour = (name) => style.getPropertyValue(name);
    const width = canvas.clientWidth;
    if (width === 0) return;
    const scale = devicePixelRatio || 1;
    const across = Math.max(1, Math.floor(width / SIDE));
    const drawn = map && map.length / across <= 60 ? map : null;
    if (!map && total / across <= 60 && canvas.dataset.total === String(total)) return;
    canvas.dataset.total = drawn ? String(total) : "";
    const height = drawn ? Math.ceil(drawn.length / across) * SIDE : 18;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const [main, shared, kept, free] = ["--main", "--shared", "--cached", "--free"].map(colour);
    if (drawn) {
      drawn.forEach((by, i) => {
        pen.fillStyle = by > 1 ? shared : by > 0 ? main : by < 0 ? kept : free;
        pen.fillRect((i % across) * SIDE, Math.floor(i / across) * SIDE, SIDE - 2, SIDE - 2);
      });
    } else {
      let from = 0;
      for (const [many, fill] of [[used, main], [cached, kept], [total - used - cached, free]]) {
        const wide = (width * many) / Math.max(1, total);
        pen.fillStyle = fill;
        pen.fillRect(from, 0, wide, height);
        from += wide;
      }
    }
  }
}
