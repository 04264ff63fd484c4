// A complete control client for Node: npm install zeromq@6 @msgpack/msgpack@3
//
// usage: node control_client.mjs ENDPOINT [VERB [ARGS as JSON]]
//
// For an endpoint with ?key=… the environment's HEADRACE_CONTROL_KEYS names the directory of this client's keys.

import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 1;
const SILENCE_MS = 20_000; // an open watch says that it lives every few seconds

class ControlError extends Error {
  constructor({ type, message, hint }) {
    super(`${type}: ${message} (${hint})`);
    this.type = type;
  }
}

class ControlClient {
  #socket = new Dealer({ linger: 0, receiveTimeout: SILENCE_MS });
  #nextId = 1;

  constructor(endpoint, keys = ".") {
    const [address, serverKey] = endpoint.split("?key=");
    if (serverKey) {
      this.#socket.curveSecretKey = readFileSync(`${keys}/node.secret`, "utf8").trim();
      this.#socket.curvePublicKey = readFileSync(`${keys}/node.public`, "utf8").trim();
      this.#socket.curveServerKey = Buffer.from(serverKey, "hex").toString("ascii");
    }
    this.#socket.connect(address);
  }

  close() {
    this.#socket.close();
  }

  // Send one request and return its result.
  async call(op, args = {}, timeoutS = 15) {
    const id = await this.#send(op, args, timeoutS);
    for (;;) {
      const reply = await this.#receive();
      if (reply.id === id) return result(reply);
    }
  }

  // Yield events until the stream ends, granting credit for what has been taken.
  async *watch(job = null, window = 64) {
    const id = await this.#send("watch", { job, credit: window }, null);
    let taken = 0;
    for (;;) {
      const reply = await this.#receive();
      if (reply.id !== id) continue; // the answer to a grant of credit
      if (!("event" in reply)) return result(reply);
      if (reply.event.kind === "alive") continue;
      yield reply.event;
      if (reply.event.kind !== "lagged") taken += 1; // lagged costs no credit
      if (taken >= window / 2) {
        await this.#send("credit", { watch: id, events: taken }, null);
        taken = 0;
      }
    }
  }

  async #send(op, args, timeoutS) {
    const id = this.#nextId++;
    await this.#socket.send(encode({ v: VERSION, id, op, args, timeout_s: timeoutS }));
    return id;
  }

  async #receive() {
    const [frame] = await this.#socket.receive(); // throws after SILENCE_MS
    return decode(frame);
  }
}

function result(reply) {
  if (!reply.ok) throw new ControlError(reply.error);
  return reply.result;
}

const [endpoint, verb, args] = process.argv.slice(2);
const client = new ControlClient(endpoint, process.env.HEADRACE_CONTROL_KEYS);
try {
  if (verb === undefined) {
    console.log(JSON.stringify({ jobs: await client.call("jobs"), tree: await client.call("tree") }));
  } else if (verb === "watch") {
    for await (const event of client.watch()) console.log(JSON.stringify(event));
  } else {
    console.log(JSON.stringify(await client.call(verb, args ? JSON.parse(args) : {})));
  }
} catch (error) {
  console.error(String(error.message ?? error));
  process.exitCode = 1;
} finally {
  client.close();
}
