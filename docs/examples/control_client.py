"""A complete control client: pyzmq and msgpack, nothing of Headrace's.

usage: python control_client.py ENDPOINT [VERB [ARGS as JSON]]

    python control_client.py ipc://runs/quickstart/control.sock                     # a short tour
    python control_client.py tcp://127.0.0.1:7000 scale '{"workers": 4}'
    python control_client.py tcp://127.0.0.1:7000 watch

For an endpoint with ?key=… the environment's HEADRACE_CONTROL_KEYS names the directory of this client's keys.
"""

import itertools
import json
import os
import pathlib
import sys

import msgpack
import zmq

VERSION = 1
SILENCE_MS = 20_000  # an open watch says that it lives every few seconds


class ControlError(Exception):
    """The server said no: ``type`` for programs, the text and ``hint`` for people."""

    def __init__(self, error):
        super().__init__(f"{error['type']}: {error['message']} ({error['hint']})")
        self.type = error["type"]


class ControlClient:
    def __init__(self, endpoint, keys=None):
        address, _, server_key = endpoint.partition("?key=")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if server_key:
            secret = pathlib.Path(keys, "node.secret").read_bytes().strip()
            self._socket.curve_secretkey = secret
            self._socket.curve_publickey = zmq.curve_public(secret)
            self._socket.curve_serverkey = bytes.fromhex(server_key)
        self._socket.connect(address)
        self._ids = itertools.count(1)

    def close(self):
        self._context.destroy(linger=0)

    def call(self, op, args=None, timeout_s=30.0):
        """Send one request and return its result."""
        request_id = self._send(op, args or {}, timeout_s)
        while True:
            reply = self._receive(int(timeout_s * 1000) + 1000)
            if reply["id"] == request_id:
                return self._result(reply)

    def watch(self, job=None, window=64):
        """Yield events until the stream ends, granting credit for what has been taken."""
        watch_id = self._send("watch", {"job": job, "credit": window}, None)
        taken = 0
        while True:
            reply = self._receive(SILENCE_MS)
            if reply["id"] != watch_id:
                continue  # the answer to a grant of credit
            if "event" not in reply:
                self._result(reply)
                return
            event = reply["event"]
            if event["kind"] == "alive":
                continue
            yield event
            if event["kind"] != "lagged":  # lagged costs no credit: it says how many events were missed
                taken += 1
            if taken >= window // 2:
                self._send("credit", {"watch": watch_id, "events": taken}, None)
                taken = 0

    def _send(self, op, args, timeout_s):
        request_id = next(self._ids)
        request = {"v": VERSION, "id": request_id, "op": op, "args": args, "timeout_s": timeout_s}
        self._socket.send(msgpack.packb(request))
        return request_id

    def _receive(self, timeout_ms):
        if not self._socket.poll(timeout_ms):
            raise TimeoutError("the control server is silent")
        return msgpack.unpackb(self._socket.recv())

    @staticmethod
    def _result(reply):
        if not reply["ok"]:
            raise ControlError(reply["error"])
        return reply["result"]


def main():
    client = ControlClient(sys.argv[1], os.environ.get("HEADRACE_CONTROL_KEYS", "."))
    try:
        if len(sys.argv) == 2:
            print(json.dumps({"jobs": client.call("jobs"), "tree": client.call("tree")}))
        elif sys.argv[2] == "watch":
            for event in client.watch():
                print(json.dumps(event), flush=True)
        else:
            args = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
            print(json.dumps(client.call(sys.argv[2], args)))
    except ControlError as error:
        sys.exit(str(error))
    finally:
        client.close()


if __name__ == "__main__":
    main()
