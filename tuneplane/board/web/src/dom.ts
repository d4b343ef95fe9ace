// Elements made from plain values. Texts of runs become text nodes and attributes, never markup.

export type Child = Node | string | number | null | undefined | false;

type Handlers = { [K in keyof HTMLElementEventMap]?: (event: HTMLElementEventMap[K]) => void };

export interface Props {
  class?: string;
  on?: Handlers;
  [attribute: string]: string | number | boolean | null | undefined | Handlers;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value as Handlers)) {
        element.addEventListener(event, handler as EventListener);
      }
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  put(element, ...children);
  return element;
}

/** Replace what an element holds. */
export function put(element: Element, ...children: Child[]): void {
  element.replaceChildren(
    ...children
      .filter((child): child is Node | string | number => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : String(child))),
  );
}

/** Set a text only where it differs, so that what a user has selected stays selected. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** A name that may be broken behind its separators, so that no line ends in the middle of a word. */
export function breakable(name: string): Node[] {
  return name.split(/(?<=[/_.:@-])(?=[^/_.:@-])/).flatMap((part, i) => (i ? [document.createElement("wbr"), new Text(part)] : [new Text(part)]));
}

const PATHS: Record<string, string> = {
  expand: "M9 3H3v6M15 3h6v6M9 21H3v-6M15 21h6v-6",
  shrink: "M3 9h6V3M21 9h-6V3M3 15h6v6M21 15h-6v6",
  table: "M4 5h16v14H4zM4 10h16M10 10v9",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  close: "M6 6l12 12M18 6L6 18",
  help: "M9.5 9a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .8-1 1.7M12 17h.01M21 12a9 9 0 1 1-18 0 9 9 0 0 1 18 0z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  runs: "M4 6h16M4 12h16M4 18h16",
  down: "M6 9l6 6 6-6",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  reset: "M4 4v6h6M4.6 10A8 8 0 1 1 4 13",
};

/** A line icon, for eyes alone: the button that it is in has the words. */
export function icon(name: string): SVGSVGElement {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", PATHS[name] ?? "");
  svg.append(path);
  return svg;
}

export function iconButton(name: string, label: string, click: () => void, more = ""): HTMLButtonElement {
  return h(
    "button",
    { type: "button", class: `icon-button ${more}`, title: label, "aria-label": label, on: { click } },
    icon(name),
  );
}

/** A run's id that keeps its end, which tells it from its neighbours, where there is no room for all. */
export function runName(id: string, name: string): HTMLElement {
  const cut = Math.max(0, id.length - TAIL);
  return h("span", { class: name }, h("span", { class: "id-head" }, id.slice(0, cut)), h("span", { class: "id-tail" }, id.slice(cut)));
}

const TAIL = 12; // -HHMMSS-xxxx

/** Hand a file to the user. */
export function download(name: string, href: string): void {
  const link = h("a", { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}
