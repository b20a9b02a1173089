// Text as it comes, token by token, coloured by how probable each was, with what else was probable.

/** What an event of either endpoint says of tokens: [{token, logprob, top: [[token, logprob]]}]. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((t) => ({
      token: t.token,
      logprob: t.logprob,
      top: (t.top_logprobs ?? []).map((o) => [o.token, o.logprob]),
    }));
  }
  return (logprobs.tokens ?? []).map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
}

/** Appends text to an element. Tokens whose text has not come yet wait for it. */
export class TokenText {
  constructor(element, tip) {
    this.element = element;
    this.tip = tip;
    this.waiting = [];
    this.tokens = 0;
    element.addEventListener("keydown", (e) => this.#move(e));
  }

  push(text, tokens) {
    this.waiting.push(...tokens);
    if (!text) return;
    const waiting = this.waiting.splice(0);
    if (waiting.length === 0) {
      this.element.append(text);
    } else if (waiting.map((t) => t.token).join("") === text) {
      for (const token of waiting) this.#span(token.token, [token]);
    } else {
      this.#span(text, waiting);
    }
  }

  #span(text, tokens) {
    const span = document.createElement("span");
    span.className = `tok q${level(Math.min(...tokens.map((t) => t.logprob)))}`;
    span.textContent = text;
    // One stop of the tab key for the whole text; arrows go from token to token.
    span.tabIndex = this.tokens++ === 0 ? 0 : -1;
    const show = () => this.tip.show(span, tokens);
    span.addEventListener("pointerenter", show);
    span.addEventListener("focus", show);
    span.addEventListener("pointerleave", () => this.tip.hide());
    span.addEventListener("blur", () => this.tip.hide());
    this.element.append(span);
  }

  #move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const to = step && event.target.classList.contains("tok") && event.target[step];
    if (!to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

/** Below these probabilities a token is coloured, each more than the one before. */
export const LEVELS = [0.7, 0.4, 0.15, 0.03];

function level(logprob) {
  return LEVELS.filter((p) => Math.exp(logprob) < p).length;
}

/** The box beside a token. */
export class Tip {
  constructor(box) {
    this.box = box;
  }

  show(span, tokens) {
    const table = document.createElement("table");
    for (const { token, logprob, top } of tokens) {
      const rows = top.some(([t]) => t === token) ? top : [[token, logprob], ...top];
      for (const [other, its] of rows) {
        const row = table.insertRow();
        if (other === token) row.className = "chosen";
        row.insertCell().textContent = JSON.stringify(other);
        row.insertCell().textContent = `${(100 * Math.exp(its)).toFixed(1)}%`;
      }
    }
    this.box.replaceChildren(table);
    this.box.hidden = false;
    const at = span.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    const below = at.bottom + 6 + height < innerHeight;
    this.box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - width - 4))}px`;
    this.box.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - height - 6)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
