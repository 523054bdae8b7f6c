// Questions to the server. A reader remembers which revision each of its answers was of, and whether it is a new one.

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path, params, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  const text = query.toString();
  let response;
  try {
    // the browser sends the ETag it has, and hands out what it kept on a 304
    response = await fetch(`api${path}${text ? `?${text}` : ""}`, { cache: "no-cache", signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the dashboard does not answer; is it still running?");
  }
  const body = await bodyOf(response);
  return {
    body,
    etag: response.headers.get("ETag"),
    revision: response.headers.get("X-Revision"),
    again: Number(response.headers.get("X-Ask-Again")),
  };
}

// What a response says; a Problem if it is an error, or if it broke off (its page was left meanwhile: an AbortError).
async function bodyOf(response) {
  let body;
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (response.ok) throw new Problem(0, "the dashboard's answer broke off; is it still running?");
  }
  if (response.ok) return body;
  throw new Problem(response.status, typeof body?.detail === "string" ? body.detail : `error ${response.status}`);
}

// The present revision, and in how many seconds to ask again: the server lets many readers take turns.
export async function revision(path) {
  const { body, again } = await ask(path);
  return { now: body.revision, again };
}

// What a branch of a trial would cost; nothing is written.
export async function branchCost(path, trial, branch) {
  return (await ask(`${path}/trials/${trial}/branch`, branch)).body;
}

// Asks something of a study. The code shows the server that one of its own pages asks, and only once.
export async function act(path, wanted, route = "acts") {
  const { body } = await ask(`${path}/code`);
  let response;
  try {
    response = await fetch(`api${path}/${route}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...wanted, code: body.code }),
    });
  } catch {
    throw new Problem(0, "the dashboard does not answer; is it still running?");
  }
  return bodyOf(response);
}

export class Reader {
  #seen = new Map();
  #leaving = new AbortController();

  // The answer under a name, and whether it differs from the last one under that name.
  async get(name, path, params) {
    const { body, etag, revision: at } = await ask(path, params, this.#leaving.signal);
    const before = this.#seen.get(name);
    const key = `${path} ${JSON.stringify(params ?? {})} ${etag}`;
    this.#seen.set(name, { key, revision: at });
    return { body, changed: before?.key !== key };
  }

  // A response may be a little older than the newest revision; it is then requested again.
  isBehind(now) {
    return [...this.#seen.values()].some((entry) => entry.revision !== now);
  }

  close() {
    this.#leaving.abort();
  }
}
