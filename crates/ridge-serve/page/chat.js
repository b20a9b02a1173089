// The conversation: asks, shows the answer as it comes, stops, and is kept.

import { fresh, Store, titleOf } from "./store.js";
import { events, withinContext } from "./stream.js";
import { LEVELS, Tip, tokensOf } from "./tokens.js";
import { AnswerTurn, errorTurn, userTurn } from "./turns.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "frequency_penalty", "presence_penalty",
];
const TOP = 5;

export class Chat {
  constructor(page) {
    this.page = page;
    this.at = (id) => page.getElementById(id);
    this.log = this.at("log");
    this.prompt = this.at("prompt");
    this.settings = this.at("settings");
    this.tip = new Tip(this.at("tip"));
    this.store = new Store(localStorage);
    this.running = null;
    this.#restore();
    this.#legend();
    this.at("ask").addEventListener("submit", (e) => {
      e.preventDefault();
      this.#said();
    });
    this.prompt.addEventListener("keydown", (e) => {
      if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
        e.preventDefault();
        this.#said();
      }
    });
    page.addEventListener("keydown", (e) => {
      if (e.key !== "Escape") return;
      this.tip.hide();
      this.at("history").hidden = true;
      this.running?.abort();
    });
    this.at("stop").addEventListener("click", () => this.running?.abort());
    this.at("clear").addEventListener("click", () => this.#open(fresh()));
    this.at("kept").addEventListener("click", () => this.#history());
    this.at("opening").addEventListener("click", (e) => {
      if (e.target.dataset.say) {
        this.prompt.value = e.target.dataset.say;
        this.#said();
      }
    });
    this.log.addEventListener("scroll", () => this.tip.hide());
    this.settings.addEventListener("change", () => this.#keep());
    const open = this.store.find(sessionStorage.getItem("ridge-open"));
    this.#open(open ?? fresh());
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
    this.at("legend").hidden = !this.#field("logprobs").checked;
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
    this.at("legend").hidden = !this.#field("logprobs").checked;
  }

  /** What the colours of tokens say. */
  #legend() {
    const percent = LEVELS.map((p) => `${100 * p}%`);
    const names = [`${percent[0]} or more`, ...percent.slice(0, -1).map((p, i) => `below ${p}`), `below ${percent.at(-1)}`];
    for (const [level, name] of names.entries()) {
      const sample = this.page.createElement("span");
      sample.className = `tok q${level}`;
      sample.textContent = name;
      this.at("legend").append(" ", sample);
    }
  }

  /** Shows a conversation to continue. */
  #open(conversation) {
    this.running?.abort();
    this.conversation = conversation;
    sessionStorage.setItem("ridge-open", conversation.id);
    this.at("history").hidden = true;
    this.answer = null;
    this.log.replaceChildren();
    for (const { role, content } of conversation.messages) {
      if (role === "user") this.log.append(userTurn(content));
      else this.#answered({ text: content, note: "" });
    }
    if (conversation.messages.length) this.#field("mode").value = conversation.mode;
    this.#started();
    this.log.scrollTo({ top: this.log.scrollHeight, behavior: "instant" });
    this.prompt.focus();
  }

  #started() {
    this.at("opening").hidden = this.log.childElementCount > 0;
  }

  #answered({ text, note }) {
    const turn = this.#answerTurn(false);
    turn.push({ text, tokens: [] });
    turn.end(note);
    return turn;
  }

  #answerTurn(coloured) {
    if (this.answer) this.answer.last = false;
    this.answer = new AnswerTurn({ tip: this.tip, coloured, again: () => this.#again() });
    this.log.append(this.answer.element);
    return this.answer;
  }

  #history() {
    const panel = this.at("history");
    panel.hidden = !panel.hidden;
    if (panel.hidden) return;
    const all = this.store.all();
    const rows = all.map((conversation) => {
      const row = this.page.createElement("li");
      const open = this.page.createElement("button");
      open.type = "button";
      open.textContent = conversation.title;
      open.title = new Date(conversation.at).toLocaleString();
      open.setAttribute("aria-current", String(conversation.id === this.conversation.id));
      open.addEventListener("click", () => this.#open(conversation));
      const remove = this.page.createElement("button");
      remove.type = "button";
      remove.textContent = "×";
      remove.setAttribute("aria-label", `Delete ${conversation.title}`);
      remove.addEventListener("click", () => {
        this.store.remove(conversation.id);
        row.remove();
        if (conversation.id === this.conversation.id) this.#open(fresh());
      });
      row.append(open, remove);
      return row;
    });
    this.at("conversations").replaceChildren(...rows);
    this.at("nothing").hidden = rows.length > 0;
  }

  /** Keeps the end in sight, unless the reader has gone up. */
  #follow(always) {
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (always || below < 120) this.log.scrollTo({ top: this.log.scrollHeight, behavior: "instant" });
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
      const before = this.conversation.messages.map(({ role, content }) => ({ role, content }));
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: said }];
      if (colours) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    } else {
      body.prompt = said;
      if (colours) body.logprobs = TOP;
    }
    return body;
  }

  #said() {
    const said = this.prompt.value;
    if (this.running || !said.trim()) return;
    const wrong = [...this.settings.querySelectorAll("input")].find((i) => !i.checkValidity());
    if (wrong) {
      this.settings.open = true;
      wrong.reportValidity();
      return;
    }
    this.prompt.value = "";
    this.log.append(userTurn(said));
    this.#ask(said);
  }

  /** Asks for another answer to what was said last. */
  #again() {
    const { messages } = this.conversation;
    if (this.running || messages.length < 2) return;
    const replaced = messages.splice(-2);
    this.answer.element.remove();
    this.#ask(replaced[0].content, replaced);
  }

  /** Asks for an answer; `replaced` are the messages that it stands for, which come back if there is none. */
  async #ask(said, replaced = []) {
    const chat = this.#field("mode").value === "chat";
    const body = this.#body(said, chat);
    const { conversation } = this;
    for (const old of this.log.querySelectorAll(".turn.error")) old.remove();
    const turn = this.#answerTurn(this.#field("logprobs").checked);
    this.#started();
    this.#follow(true);
    const running = new AbortController();
    this.running = running;
    this.#busy(true);
    const began = performance.now();
    let [first, last, usage, finish, failure] = [null, null, null, null, null];
    try {
      const headers = { "Content-Type": "application/json" };
      const key = this.#field("key").value;
      if (key) headers.Authorization = `Bearer ${key}`;
      const options = { headers, signal: running.signal };
      const path = chat ? "/v1/chat/completions" : "/v1/completions";
      const asked = JSON.stringify(await withinContext(body, options));
      const response = await fetch(path, { method: "POST", ...options, body: asked });
      for await (const event of events(response)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const text = chat ? (choice.delta.content ?? "") : choice.text;
        const thought = choice.delta?.reasoning_content ?? "";
        const calls = (choice.delta?.tool_calls ?? []).map((c) => (c.function?.name ?? "") + (c.function?.arguments ?? ""));
        if (text || thought) {
          first ??= performance.now();
          last = performance.now();
        }
        // Tokens of reasoning are not of the text that follows it.
        turn.push({ text, thought, tokens: thought ? [] : tokensOf(choice.logprobs) });
        if (calls.length) turn.call(calls.join(""));
        finish = choice.finish_reason ?? finish;
        this.#follow();
      }
    } catch (error) {
      failure = error.name === "AbortError" ? null : error;
      finish = failure ? "failed" : "stopped";
    }
    if (this.running === running) {
      this.running = null;
      this.#busy(false);
    }
    turn.end(summary({ began, first, last, usage, finish }));
    // Another conversation may have been opened meanwhile.
    const here = this.conversation === conversation;
    if (turn.text || !failure) {
      conversation.messages.push({ role: "user", content: said }, { role: "assistant", content: turn.text });
      Object.assign(conversation, { mode: chat ? "chat" : "text", at: Date.now(), title: conversation.title || titleOf(said) });
      if (!this.store.keep(conversation)) this.at("status").textContent = "the browser keeps no conversations";
    } else {
      conversation.messages.push(...replaced);
      if (here) {
        turn.element.remove();
        this.answer = null;
        if (replaced.length) this.#answered({ text: replaced[1].content, note: "" });
      }
    }
    if (failure && here) this.#failed(failure, said, turn.text === "");
    this.#follow();
  }

  #failed(error, said, nothing) {
    let message = error instanceof TypeError ? `the server cannot be reached (${error.message})` : error.message;
    if (error.code === "no_chat_template") {
      this.#field("mode").value = "text";
      message += " (the page now continues texts instead)";
    }
    if (error.code === "invalid_api_key") {
      this.settings.open = true;
      this.#field("key").focus();
    }
    const again = this.answer ? () => this.#again() : () => this.#ask(said);
    this.log.append(errorTurn(message, nothing ? again : null));
    this.#follow(true);
  }

  #busy(busy) {
    this.at("send").disabled = busy;
    this.at("stop").disabled = !busy;
    this.log.setAttribute("aria-busy", String(busy));
    this.at("status").textContent = busy ? "answering" : "";
  }
}

function summary({ began, first, last, usage, finish }) {
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} tokens read, ${usage.completion_tokens} generated`);
  if (first !== null) parts.push(`first after ${(first - began).toFixed(0)} ms`);
  const more = (usage?.completion_tokens ?? 0) - 1;
  if (more > 0 && last > first) parts.push(`then ${((1000 * more) / (last - first)).toFixed(1)} a second`);
  const ends = { length: "cut at the most tokens", stopped: "stopped", failed: "broken off" };
  if (ends[finish]) parts.push(ends[finish]);
  return parts.join(", ");
}
