// The conversation: asks, shows the answer as it comes, stops.

import { events } from "./stream.js";
import { TokenText, Tip, tokensOf } from "./tokens.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "frequency_penalty", "presence_penalty",
];
const TOP = 5;

export class Chat {
  constructor(page) {
    this.log = page.getElementById("log");
    this.form = page.getElementById("ask");
    this.prompt = page.getElementById("prompt");
    this.status = page.getElementById("status");
    this.send = page.getElementById("send");
    this.stop = page.getElementById("stop");
    this.settings = page.getElementById("settings");
    this.tip = new Tip(page.getElementById("tip"));
    this.messages = [];
    this.running = null;
    this.#restore();
    this.form.addEventListener("submit", (e) => {
      e.preventDefault();
      this.#ask();
    });
    this.prompt.addEventListener("keydown", (e) => {
      if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
        e.preventDefault();
        this.#ask();
      }
    });
    page.addEventListener("keydown", (e) => {
      if (e.key === "Escape") {
        this.tip.hide();
        this.running?.abort();
      }
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    page.getElementById("clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      this.log.replaceChildren();
      this.prompt.focus();
    });
    this.log.addEventListener("scroll", () => this.tip.hide());
    this.settings.addEventListener("change", () => this.#keep());
  }

  #field(name) {
    return this.settings.querySelector(`[name="${name}"]`);
  }

  // Settings outlast the page, the key only the browser's tab.
  #keep() {
    const kept = {};
    for (const field of this.settings.querySelectorAll("[name]")) {
      if (field.name === "key") sessionStorage.setItem("ridge-key", field.value);
      else kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
    }
    localStorage.setItem("ridge-settings", JSON.stringify(kept));
  }

  #restore() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem("ridge-settings")) ?? {};
    } catch {
      // What was kept cannot be read: the defaults stay.
    }
    for (const [name, value] of Object.entries(kept)) {
      const field = this.#field(name);
      if (field?.type === "checkbox") field.checked = value === true;
      else if (field) field.value = value;
    }
    this.#field("key").value = sessionStorage.getItem("ridge-key") ?? "";
  }

  #turn(kind) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    this.log.append(turn);
    this.#follow();
    return turn;
  }

  /** Keeps the end in sight, unless the reader has gone up. */
  #follow() {
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (below < 120) this.log.scrollTo({ top: this.log.scrollHeight, behavior: "instant" });
  }

  #body(said, chat) {
    const body = { stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const value = this.#field(name).value;
      if (value !== "") body[name] = Number(value);
    }
    const colours = this.#field("logprobs").checked;
    if (chat) {
      const system = this.#field("system").value.trim();
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages, { role: "user", content: said }];
      if (colours) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    } else {
      body.prompt = said;
      if (colours) body.logprobs = TOP;
    }
    return body;
  }

  async #ask() {
    const said = this.prompt.value;
    if (this.running || !said) return;
    const wrong = [...this.settings.querySelectorAll("input")].find((i) => !i.checkValidity());
    if (wrong) {
      this.settings.open = true;
      wrong.reportValidity();
      return;
    }
    const chat = this.#field("mode").value === "chat";
    const body = this.#body(said, chat);
    this.prompt.value = "";
    this.#turn("user").textContent = said;
    const turn = this.#turn("assistant");
    const [reasoning, text, note] = ["div", "span", "span"].map((tag) => turn.appendChild(document.createElement(tag)));
    reasoning.className = "reasoning";
    note.className = "note";
    const shown = new TokenText(text, this.tip);
    this.running = new AbortController();
    this.#busy(true);
    const began = performance.now();
    let [first, last, usage, finish, answer] = [null, null, null, null, ""];
    try {
      const headers = { "Content-Type": "application/json" };
      const key = this.#field("key").value;
      if (key) headers.Authorization = `Bearer ${key}`;
      const path = chat ? "/v1/chat/completions" : "/v1/completions";
      const { signal } = this.running;
      const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
      for await (const event of events(response)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const piece = chat ? (choice.delta.content ?? "") : choice.text;
        const thought = choice.delta?.reasoning_content ?? "";
        const calls = (choice.delta?.tool_calls ?? []).map((c) => (c.function?.name ?? "") + (c.function?.arguments ?? ""));
        if (piece || thought) {
          first ??= performance.now();
          last = performance.now();
        }
        answer += piece;
        reasoning.append(thought);
        // Tokens of reasoning are not of the text that follows it.
        shown.push(piece, thought ? [] : tokensOf(choice.logprobs));
        if (calls.length) text.append(calls.join(""));
        finish = choice.finish_reason ?? finish;
        this.#follow();
      }
    } catch (error) {
      if (error.name === "AbortError") {
        finish = "stopped";
      } else {
        const message = document.createElement("div");
        message.className = "turn error";
        message.setAttribute("role", "alert");
        message.textContent = error.message;
        if (error.code === "no_chat_template") {
          this.#field("mode").value = "text";
          message.textContent += " (the page now lets the model go on with a text: send it again)";
          this.prompt.value = said;
        }
        turn.after(message);
        if (!answer) turn.remove();
        finish = "failed";
      }
    }
    if (chat && finish !== "failed") {
      this.messages.push({ role: "user", content: said }, { role: "assistant", content: answer });
    }
    note.textContent = summary({ began, first, last, usage, finish });
    this.running = null;
    this.#busy(false);
    this.#follow();
  }

  #busy(busy) {
    this.send.disabled = busy;
    this.stop.disabled = !busy;
    this.log.setAttribute("aria-busy", String(busy));
    this.status.textContent = busy ? "answering" : "";
  }
}

function summary({ began, first, last, usage, finish }) {
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} tokens read, ${usage.completion_tokens} generated`);
  if (first !== null) parts.push(`first after ${(first - began).toFixed(0)} ms`);
  const more = (usage?.completion_tokens ?? 0) - 1;
  if (more > 0 && last > first) parts.push(`then ${((1000 * more) / (last - first)).toFixed(1)} a second`);
  const ends = { length: "cut at the most tokens", stopped: "stopped", failed: "" };
  if (ends[finish]) parts.push(ends[finish]);
  return parts.join(", ");
}
