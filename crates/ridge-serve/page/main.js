// What the page does: `chat` is the conversation, `live` the engine at work.

import { Chat } from "./chat.js";
import { Live } from "./live.js";

const buttons = document.querySelectorAll("nav button");
for (const button of buttons) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
  });
}
new Chat(document);
new Live(document);
