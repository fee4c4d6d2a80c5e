// Walks through the step, and through the tensors of its map: with the pointer, or with the arrow keys once a picture has the focus.
(() => {
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (n >= 1024 && unit < 4) { n /= 1024; unit += 1; }
    return `${unit ? n.toFixed(1) : n} ${units[unit]}`;
  };
  const time = (ns) => ns >= 1e9 ? `${(ns / 1e9).toFixed(2)} s` : ns >= 1e6 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e3).toFixed(1)} us`;
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);

  // Of a picture: how data lie in it, by the plot area that the chart says it has.
  const plot = (svg) => {
    const width = svg.viewBox.baseVal.width, left = +svg.dataset.left, room = width - left - svg.dataset.right;
    const floor = +svg.dataset.floor, height = floor - svg.dataset.top;
    return { left, room, floor, height, high: +svg.dataset.high, width };
  };

  // A figure that is a slider from 0 to ``last``. ``words(at)`` says what is there, ``mark(svg, at)`` shows where that is, and
  // ``under(across, up, area)`` is the position at shares of the plot area, or undefined.
  const walker = (figure, output, last, start, words, mark, under) => {
    let at = start;
    const show = (to) => {
      at = Math.max(0, Math.min(last, to));
      output.textContent = words(at);
      figure.setAttribute("aria-valuenow", at);
      figure.setAttribute("aria-valuetext", output.textContent);
      for (const svg of figure.querySelectorAll("svg")) mark(svg, at);
    };
    figure.addEventListener("pointermove", (event) => {
      const svg = event.target.closest("svg");
      if (!svg) return;
      const edge = svg.getBoundingClientRect(), area = plot(svg), zoom = area.width / edge.width;
      const across = ((event.clientX - edge.left) * zoom - area.left) / area.room;
      const found = under(across, (area.floor - (event.clientY - edge.top) * zoom) / area.height, area);
      if (found !== undefined) show(found);
    });
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -30, PageUp: 30 };
    figure.addEventListener("keydown", (event) => {
      if (event.key in steps) show(at + steps[event.key]);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(last);
      else return;
      event.preventDefault();
    });
    return show;
  };

  const step = read("step");
  const running = (at) => {
    const within = step.within[at], without = step.without[at];
    const parts = [`${time(step.end_ns * at / step.slices)}: `];
    parts.push(within === undefined ? "ended" : `${bytes(within)} within the budget`);
    parts.push(without === undefined ? ", ended without" : `, ${bytes(without)} without`);
    if (within !== undefined) parts.push(`. Running ${step.names[step.running[at]]}`);
    return parts.join("");
  };
  const cursor = (svg, at) => {
    const area = plot(svg), x = area.left + area.room * (at + 0.5) / step.slices, line = svg.querySelector(".cursor");
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
  };
  walker(byId("walk"), byId("here"), step.slices - 1, step.peak, running, cursor, (across) => Math.floor(across * step.slices))(step.peak);

  if (!byId("map")) return;
  const map = read("tensors");
  const tensor = (at) => {
    const [start, end, address, size, what] = map.rectangles[at];
    return `${bytes(size)} at ${bytes(address)}, from ${time(start)} to ${time(end)}: ${map.names[what]}`;
  };
  const outline = (svg, at) => {
    const area = plot(svg), [start, end, address, size] = map.rectangles[at], frame = svg.querySelector(".picked");
    const height = area.height * size / area.high;
    frame.setAttribute("x", area.left + area.room * start / map.end_ns);
    frame.setAttribute("y", area.floor - area.height * address / area.high - height);
    frame.setAttribute("width", area.room * (end - start) / map.end_ns);
    frame.setAttribute("height", height);
  };
  const lying = (across, up, area) => {
    const ns = across * map.end_ns, address = up * area.high;
    const found = map.rectangles.findIndex(([start, end, low, size]) => start <= ns && ns < end && low <= address && address < low + size);
    return found < 0 ? undefined : found;
  };
  if (map.rectangles.length) walker(byId("map"), byId("lies"), map.rectangles.length - 1, 0, tensor, outline, lying);
})();
