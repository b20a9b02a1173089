// Markdown as models write it: `parse` makes a tree of it, and `render` nodes of the page. No markup of a model is ever
// inserted as such: what is not understood is text.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 20;

/** The blocks of a text: [{type, ...}]. A fence that is not closed yet goes to the end. */
export function parse(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({ type: "paragraph", inline: inline(paragraph.join("\n").trim()) });
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      flush();
      const code = [];
      const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (++i < lines.length && !close.test(lines[i])) code.push(lines[i]);
      blocks.push({ type: "code", language: fence[2], text: code.join("\n") });
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      flush();
      blocks.push({ type: "heading", level: heading[1].length, inline: inline(heading[2]) });
      continue;
    }
    if (RULE.test(line)) {
      flush();
      blocks.push({ type: "rule" });
      continue;
    }
    if (QUOTE.test(line) && depth < DEEPEST) {
      flush();
      const inner = [];
      for (; i < lines.length && QUOTE.test(lines[i]); i++) inner.push(QUOTE.exec(lines[i])[1]);
      i--;
      blocks.push({ type: "quote", blocks: parse(inner.join("\n"), depth + 1) });
      continue;
    }
    if (ITEM.test(line) && depth < DEEPEST) {
      flush();
      const [list, next] = items(lines, i, depth);
      blocks.push(list);
      i = next - 1;
      continue;
    }
    if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DIVIDER.test(lines[i + 1])) {
      flush();
      const rows = [cells(line)];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cells(lines[i]));
      i--;
      blocks.push({ type: "table", rows });
      continue;
    }
    if (line.trim() === "") flush();
    else paragraph.push(line);
  }
  flush();
  return blocks;
}

/** The list that begins at `lines[at]`, and where it ends. */
function items(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const [indent, ordered] = [first[1].length, /\d/.test(first[2])];
  const list = { type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items: [] };
  let i = at;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[4]];
    const width = indent + item[2].length + 1;
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const deeper = line.length - line.trimStart().length > indent;
      if (line.trim() === "") {
        // A blank line ends the list unless what follows belongs to it.
        const next = lines.slice(i + 1).find((l) => l.trim() !== "");
        const same = next && ITEM.exec(next);
        if (!next || !(next.startsWith(" ".repeat(indent + 1)) || (same && same[1].length === indent))) break;
        inner.push("");
      } else if (deeper) {
        inner.push(line.slice(Math.min(width, line.length - line.trimStart().length)));
      } else if (ITEM.test(line) || inner.at(-1) === "" || HEADING.test(line) || FENCE.test(line)) {
        break;
      } else {
        inner.push(line);
      }
    }
    list.items.push(parse(inner.join("\n"), depth + 1));
    while (i < lines.length && lines[i].trim() === "" && ITEM.exec(lines[i + 1] ?? "")?.[1].length === indent) i++;
  }
  return [list, i];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => inline(cell.trim().replaceAll("\\|", "|")));
}

const MARKS = [
  ["strong", "**"], ["strong", "__"], ["del", "~~"], ["em", "*"], ["em", "_"],
];
const LINK = /^\[([^\]\n]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const BARE = /^https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?]/;

/** The pieces of a line: texts, and {type, inline} or {type: "code", text} or {type: "link", url, inline}. */
export function inline(text, depth = 0) {
  const pieces = [];
  let plain = "";
  const add = (piece) => {
    if (plain) pieces.push(plain);
    plain = "";
    pieces.push(piece);
  };
  for (let i = 0; i < text.length; ) {
    const rest = text.slice(i);
    if (rest[0] === "\\" && /[!-/:-@[-`{-~]/.test(rest[1] ?? "")) {
      plain += rest[1];
      i += 2;
      continue;
    }
    const ticks = /^`+/.exec(rest)?.[0];
    if (ticks) {
      const end = rest.slice(ticks.length).search(new RegExp(`(?<!\`)${ticks}(?!\`)`));
      if (end >= 0) {
        const code = rest.slice(ticks.length, ticks.length + end);
        add({ type: "code", text: /^ .* $/s.test(code) && code.trim() ? code.slice(1, -1) : code });
        i += end + 2 * ticks.length;
        continue;
      }
      plain += ticks;
      i += ticks.length;
      continue;
    }
    const link = LINK.exec(rest);
    if (link && depth < DEEPEST) {
      add({ type: "link", url: link[2], inline: inline(link[1], depth + 1) });
      i += link[0].length;
      continue;
    }
    const bare = /(^|[\s(])$/.test(text.slice(0, i)) && BARE.exec(rest);
    if (bare) {
      add({ type: "link", url: bare[0], inline: [bare[0]] });
      i += bare[0].length;
      continue;
    }
    const mark = depth < DEEPEST && MARKS.find(([, mark]) => rest.startsWith(mark));
    if (mark) {
      const [type, sign] = mark;
      const end = closing(rest, sign, text[i - 1]);
      if (end > 0) {
        add({ type, inline: inline(rest.slice(sign.length, end), depth + 1) });
        i += end + sign.length;
        continue;
      }
      plain += sign;
      i += sign.length;
      continue;
    }
    plain += rest[0];
    i += 1;
  }
  if (plain) pieces.push(plain);
  return pieces;
}

/** Where `sign`, with which `text` begins, is closed; -1 if it stands for itself. */
function closing(text, sign, before) {
  const word = /\w/;
  if (/\s/.test(text[sign.length] ?? " ") || (sign[0] === "_" && word.test(before ?? ""))) return -1;
  for (let at = text.indexOf(sign, sign.length + 1); at > 0; at = text.indexOf(sign, at + 1)) {
    const after = text[at + sign.length] ?? "";
    if (/\s/.test(text[at - 1]) || (sign[0] === "_" && word.test(after))) continue;
    if (sign.length === 1 && (after === sign || text[at - 1] === sign)) continue;
    return at;
  }
  return -1;
}

/** Nodes for a tree of `parse`. `copy` is called with the text of a block of code that is to be copied. */
export function render(page, blocks, copy) {
  const all = page.createDocumentFragment();
  for (const block of blocks) all.append(blockNode(page, block, copy));
  return all;
}

function blockNode(page, block, copy) {
  const make = (tag, ...inner) => {
    const made = page.createElement(tag);
    made.append(...inner);
    return made;
  };
  switch (block.type) {
    case "heading":
      return make(`h${Math.min(6, block.level + 2)}`, inlineNodes(page, block.inline));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", render(page, block.blocks, copy));
    case "list": {
      const list = make(block.ordered ? "ol" : "ul", ...block.items.map((item) => make("li", render(page, tight(item), copy))));
      if (block.ordered && block.start !== 1) list.start = block.start;
      return list;
    }
    case "table": {
      const [head, ...rows] = block.rows.map((row) => row.map((cell) => inlineNodes(page, cell)));
      const body = rows.map((row) => make("tr", ...row.map((cell) => make("td", cell))));
      const table = make("table", make("thead", make("tr", ...head.map((cell) => make("th", cell)))), make("tbody", ...body));
      const frame = make("div", table);
      frame.className = "wide";
      return frame;
    }
    case "code": {
      const button = make("button", "Copy");
      button.type = "button";
      button.addEventListener("click", () => copy(block.text, button));
      const bar = make("div", make("span", block.language || "text"), button);
      bar.className = "bar";
      const frame = make("div", bar, make("pre", make("code", block.text)));
      frame.className = "code";
      return frame;
    }
    case "line":
      return inlineNodes(page, block.inline);
    default:
      return make("p", inlineNodes(page, block.inline));
  }
}

/** An item of one paragraph is a line. */
function tight(blocks) {
  return blocks.map((block, i) => (i === 0 && block.type === "paragraph" ? { ...block, type: "line" } : block));
}

function inlineNodes(page, pieces) {
  const all = page.createDocumentFragment();
  for (const piece of pieces) {
    if (typeof piece === "string") {
      all.append(piece);
      continue;
    }
    const inner = piece.inline ? inlineNodes(page, piece.inline) : piece.text;
    // What leads elsewhere than to a page is text.
    const safe = piece.type === "link" && /^(https?:|mailto:)/i.test(piece.url);
    if (piece.type === "link" && !safe) {
      all.append(inner);
      continue;
    }
    const node = page.createElement(piece.type === "link" ? "a" : piece.type);
    if (safe) Object.assign(node, { href: piece.url, target: "_blank", rel: "noopener noreferrer" });
    node.append(inner);
    all.append(node);
  }
  return all;
}
