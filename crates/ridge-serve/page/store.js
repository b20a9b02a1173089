// Conversations, kept in the browser: the newest first.

const KEY = "ridge-conversations";
const MOST = 100;

export class Store {
  constructor(storage) {
    this.storage = storage;
  }

  /** All conversations: [{id, title, mode, messages: [{role, content, ...}], at}]. */
  all() {
    try {
      const kept = JSON.parse(this.storage.getItem(KEY)) ?? [];
      return kept.filter((c) => typeof c.id === "string" && Array.isArray(c.messages));
    } catch {
      // What was kept cannot be read, or nothing may be kept.
      return [];
    }
  }

  find(id) {
    return this.all().find((c) => c.id === id);
  }

  /** Keeps a conversation; the oldest make room. False if the browser keeps nothing. */
  keep(conversation) {
    let all = [conversation, ...this.all().filter((c) => c.id !== conversation.id)].slice(0, MOST);
    while (all.length) {
      try {
        this.storage.setItem(KEY, JSON.stringify(all));
        return true;
      } catch {
        all = all.slice(0, -1);
      }
    }
    return false;
  }

  remove(id) {
    const rest = this.all().filter((c) => c.id !== id);
    try {
      this.storage.setItem(KEY, JSON.stringify(rest));
    } catch {
      // Nothing is kept, so that nothing is there to remove.
    }
  }
}

/** A conversation that begins. */
export function fresh() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, title: "", mode: "chat", messages: [], at: Date.now() };
}

/** What a conversation is called: the beginning of what was said first. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "untitled";
}
