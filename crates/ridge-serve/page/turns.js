// What was said, turn by turn: answers as text with marks, or token by token, with what can be done with them.

import { parse, render } from "./markdown.js";
import { TokenText } from "./tokens.js";

/** Copies a text, and says so on the button. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // A page that did not come over TLS may not: the selection can.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Copy failed";
    area.remove();
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function make(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** What the user said. */
export function userTurn(text) {
  const turn = make("div", "turn user", text);
  turn.setAttribute("aria-label", "You");
  return turn;
}

/** What went wrong, with `retry` to try again. */
export function errorTurn(message, retry) {
  const turn = make("div", "turn error");
  turn.setAttribute("role", "alert");
  turn.append(make("strong", "", "Error: "), message);
  if (retry) {
    const button = make("button", "", "Retry");
    button.type = "button";
    button.addEventListener("click", retry);
    turn.append(" ", button);
  }
  return turn;
}

/** An answer while it comes, and afterwards. `again` asks for another one. */
export class AnswerTurn {
  constructor({ tip, coloured, again }) {
    this.element = make("article", "turn assistant");
    this.element.setAttribute("aria-label", "Model");
    this.thoughts = make("details", "reasoning");
    this.thoughts.append(make("summary", "", "Reasoning"));
    this.thought = this.thoughts.appendChild(make("div", ""));
    this.thoughts.hidden = true;
    this.thoughts.open = true;
    this.tokens = make("div", "tokens");
    this.marked = make("div", "marked");
    this.note = make("span", "note");
    this.bar = make("div", "bar actions");
    this.bar.hidden = true;
    this.element.append(this.thoughts, this.tokens, this.marked, this.bar, this.note);
    this.shown = new TokenText(this.tokens, tip);
    this.text = "";
    this.drawn = 0;
    this.#show(coloured);
    this.#action("Copy", (button) => copy(this.text, button));
    this.view = this.#action("", () => this.#show(!this.coloured));
    this.again = this.#action("Regenerate", again);
    this.#show(coloured);
  }

  #action(name, act) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => act(button));
    this.bar.append(button);
    return button;
  }

  #show(coloured) {
    this.coloured = coloured;
    this.tokens.hidden = !coloured;
    this.marked.hidden = coloured;
    if (this.view) this.view.textContent = coloured ? "Formatted" : "Tokens";
    this.#mark();
  }

  #mark() {
    if (!this.coloured) this.marked.replaceChildren(render(document, parse(this.text), copy));
  }

  /** More of the answer; `tokens` of it, if they are told. */
  push({ text, thought, tokens }) {
    if (thought) {
      this.thoughts.hidden = false;
      this.thought.append(thought);
    }
    if (!text) return;
    if (this.text === "" && thought !== undefined) this.thoughts.open = this.thoughts.hidden;
    this.text += text;
    this.shown.push(text, tokens);
    // Long answers are not laid out again for every token.
    const now = performance.now();
    if (now - this.drawn > 80) {
      this.drawn = now;
      this.#mark();
    }
  }

  /** A call of a tool: its name and arguments, as far as they have come. */
  call(text) {
    this.tokens.append(text);
    this.text += text;
    this.#mark();
  }

  end(note) {
    this.note.textContent = note;
    this.bar.hidden = this.text === "";
    this.view.hidden = this.shown.tokens === 0 && !this.coloured;
    this.#mark();
  }

  /** Is it the last answer, of which there can be another? */
  set last(is) {
    this.again.hidden = !is;
  }
}
