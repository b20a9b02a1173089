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
          this.at("model").className = "wrong";
        }
      }
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  #show({ model, context, engine }) {
    this.at("model").textContent = `${model}, context of ${context.toLocaleString("en")} tokens`;
    this.at("model").className = "";
    this.at("name").textContent = model;
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
    this.#chart("steps", "step", steps, now, { time: "ms", floor: "floor_ms" });
    this.#chart("batch", "step", steps, now, { tokens: "tokens", sequences: "sequences" });
    this.#chart("ttft", "answer", answers, now, { ttft: "ttft_ms" });
    this.#chart("tpot", "answer", answers, now, { tpot: "tpot_ms" });
  }

  // By number, not by time: what happens between two of them is nothing.
  #chart(id, what, items, now, fields) {
    const of = (field) => items.map((item, i) => [i, item[field]]).filter(([, value]) => value !== null);
    // A line would say what lies between; floors are known of some steps alone.
    const dots = (name) => what === "answer" || name === "floor";
    const series = Object.entries(fields).map(([name, field]) => ({ name, points: of(field), dots: dots(name) }));
    const ago = items.length ? Math.max(0, now - items.at(-1).at_s).toFixed(0) : 0;
    const axis = items.length === 1 ? `one ${what}, ${ago} s ago` : `${items.length} ${what}s, the last ${ago} s ago`;
    draw(this.at(id), { series, x0: 0, x1: items.length - 1, axis, none: `no ${what} yet` });
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
