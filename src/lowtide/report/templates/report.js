// Walks through the step: with the pointer, or with the arrow keys once the picture has the focus.
(() => {
  const data = JSON.parse(document.getElementById("step").textContent);
  const figure = document.getElementById("walk"), output = document.getElementById("here");
  const last = data.slices - 1;
  let at = data.peak;
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (n >= 1024 && unit < 4) { n /= 1024; unit += 1; }
    return `${unit ? n.toFixed(1) : n} ${units[unit]}`;
  };
  const time = (ns) => ns >= 1e9 ? `${(ns / 1e9).toFixed(2)} s` : ns >= 1e6 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e3).toFixed(1)} us`;
  const show = () => {
    const within = data.within[at], without = data.without[at];
    const parts = [`${time(data.end_ns * at / data.slices)}: `];
    parts.push(within === undefined ? "ended" : `${bytes(within)} within the budget`);
    parts.push(without === undefined ? ", ended without" : `, ${bytes(without)} without`);
    if (within !== undefined) parts.push(`. Running ${data.names[data.running[at]]}`);
    const words = parts.join("");
    output.textContent = words;
    figure.setAttribute("aria-valuenow", at);
    figure.setAttribute("aria-valuetext", words);
    for (const svg of figure.querySelectorAll("svg")) {
      const box = svg.viewBox.baseVal, left = +svg.dataset.left, room = box.width - left - svg.dataset.right;
      const x = left + room * (at + 0.5) / data.slices, line = svg.querySelector(".cursor");
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
  };
  const move = (to) => { at = Math.max(0, Math.min(last, to)); show(); };
  figure.addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg");
    if (!svg) return;
    const edge = svg.getBoundingClientRect(), box = svg.viewBox.baseVal, left = +svg.dataset.left;
    const x = (event.clientX - edge.left) * box.width / edge.width;
    move(Math.floor((x - left) / (box.width - left - svg.dataset.right) * data.slices));
  });
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -30, PageUp: 30 };
  figure.addEventListener("keydown", (event) => {
    if (event.key in steps) move(at + steps[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(last);
    else return;
    event.preventDefault();
  });
  show();
})();
