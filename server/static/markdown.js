"use strict";
// The part of Markdown that models write, as DOM nodes: paragraphs, headings, lists, quotes, tables,
// code, emphasis and links. There is no way from text to markup here: every text ends in a text
// node, links go to http(s) addresses only, and images are never loaded.

// Every part is bounded, so that no text takes long however it is made.
const INLINE = new RegExp(
  [
    "(?<!`)(?<code>`{1,3})(?!`)(?<codeText>(?:(?!\\k<code>).){1,500})\\k<code>(?!`)",
    "\\*\\*(?<strong>[^\\s*](?:(?:(?!\\*\\*).){0,500}[^\\s*])?)\\*\\*",
    "(?<![\\w*])\\*(?<em>[^\\s*](?:[^*]{0,500}[^\\s*])?)\\*(?![\\w*])",
    "(?<image>!?)\\[(?<label>[^\\][]{0,300})\\]\\((?<target>[^\\s()]{0,800}(?:\\([^\\s()]{0,99}\\)[^\\s()]{0,99}){0,4})\\)",
  ].join("|"),
  "s",
);

function safeAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const address = new URL(text);
    return ["http:", "https:"].includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

function inlineNodes(text, depth = 0) {
  const nodes = [];
  let rest = text;
  while (rest && depth < 8) {
    const found = INLINE.exec(rest);
    if (!found) break;
    if (found.index) nodes.push(document.createTextNode(rest.slice(0, found.index)));
    nodes.push(inlineNode(found, depth));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(document.createTextNode(rest));
  return nodes;
}

function inlineNode(found, depth) {
  const { code, codeText, strong, em, image, label, target } = found.groups;
  if (code) return el("code", {}, codeText.trim() || codeText);
  if (strong) return el("strong", {}, ...inlineNodes(strong, depth + 1));
  if (em) return el("em", {}, ...inlineNodes(em, depth + 1));
  const href = image ? null : safeAddress(target);
  // What is no plain link stays the text that it is.
  if (href === null) return document.createTextNode(found[0]);
  const link = el("a", { href, rel: "noopener noreferrer nofollow", target: "_blank", title: href });
  link.append(...inlineNodes(label || target, depth + 1));
  return link;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const isTableRule = (line) => line !== undefined && line.length < 500 && TABLE_RULE.test(line);

// Splits a text into blocks: `{ kind, lines }`. A block that is complete never changes when more
// text comes, so its nodes can be kept.
function markdownBlocks(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      const closing = new RegExp("^ {0,3}" + fence[1][0] + "{" + fence[1].length + ",}\\s*$");
      while (++i < lines.length && !closing.test(lines[i])) body.push(lines[i]);
      blocks.push({ kind: "code", language: fence[2], lines: body });
    } else if (/^#{1,6}\s/.test(line)) {
      blocks.push({ kind: "heading", level: line.indexOf(" "), lines: [line.replace(/^#+\s+/, "")] });
    } else if (line.length < 100 && /^ {0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      blocks.push({ kind: "rule", lines: [] });
    } else if (line.includes("|") && isTableRule(lines[i + 1])) {
      const rows = [line];
      for (i += 1; lines[i + 1]?.includes("|"); i++) rows.push(lines[i + 1]);
      blocks.push({ kind: "table", lines: rows });
    } else if (line.trim()) {
      const kind = ITEM.test(line) ? "list" : line.startsWith(">") ? "quote" : "paragraph";
      const body = [line];
      while (i + 1 < lines.length && belongs(lines[i + 1], kind, lines[i + 2])) body.push(lines[++i]);
      blocks.push({ kind, lines: body });
    }
  }
  return blocks;
}

function belongs(line, kind, next) {
  if (!line.trim()) return kind === "list" && next !== undefined && (ITEM.test(next) || /^\s{2,}\S/.test(next));
  if (FENCE.test(line) || /^#{1,6}\s/.test(line)) return false;
  if (kind === "list") return true;
  if (kind === "quote") return line.startsWith(">");
  return !line.startsWith(">") && !/^\s*([-*+]|1[.)])\s+/.test(line);
}

function blockNode({ kind, lines, level, language }) {
  if (kind === "code") return codeBlock(lines.join("\n"), language);
  if (kind === "rule") return el("hr");
  if (kind === "heading") return el(level <= 2 ? "h3" : "h4", {}, ...inlineNodes(lines[0]));
  if (kind === "list") return listNode(lines);
  if (kind === "table") return tableNode(lines);
  if (kind === "quote") {
    return el("blockquote", {}, ...inlineNodes(lines.map((line) => line.replace(/^>\s?/, "")).join("\n")));
  }
  return el("p", {}, ...inlineNodes(lines.join("\n")));
}

function codeBlock(text, language) {
  const head = el("div", { className: "code-head" }, language || "code");
  head.append(button("Copy", () => copyText(text, "Code")));
  return el("div", { className: "code-block" }, head, el("pre", {}, el("code", {}, text)));
}

// Items at their indents; deeper ones become lists inside the item before them.
function listNode(lines) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) items.push({ indent: found[1].length, mark: found[2], text: [found[3]] });
    else if (line.trim()) items.at(-1).text.push(line.trim());
  }
  const root = newList(items[0].mark);
  const open = [{ indent: items[0].indent, list: root }];
  for (const item of items) {
    while (open.length > 1 && item.indent < open.at(-1).indent) open.pop();
    const last = open.at(-1).list.lastElementChild;
    if (item.indent > open.at(-1).indent + 1 && last && open.length < 8) {
      const list = newList(item.mark);
      last.append(list);
      open.push({ indent: item.indent, list });
    }
    open.at(-1).list.append(el("li", {}, ...inlineNodes(item.text.join("\n"))));
  }
  return root;
}

function newList(mark) {
  return /\d/.test(mark) ? el("ol", { start: Number.parseInt(mark, 10) }) : el("ul");
}

function tableNode(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inlineNodes(cell))));
  const body = el("tbody", {}, ...lines.slice(1).map((line) => row(line, "td")));
  return el("div", { className: "table-scroll" }, el("table", {}, el("thead", {}, row(lines[0], "th")), body));
}

// Shows a growing text; nodes of blocks that did not change are left alone.
class MarkdownView {
  constructor(host) {
    this.host = host;
    this.sources = [];
  }

  show(text) {
    const blocks = markdownBlocks(text);
    const sources = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.host.childNodes.length > same) this.host.lastChild.remove();
    this.host.append(...blocks.slice(same).map(blockNode));
    this.sources = sources;
  }
}
