"""A scheduler that gives intervals alone, on the standard library: decodes first, then prompts in pieces,
then whoever came first and fits. Start it with ``--scheduler-command "python intervals.py"``.

``--off-by-one`` plants a fault: a prompt's second piece begins one token late.
"""

import json
import sys

OFF_BY_ONE = "--off-by-one" in sys.argv


class Scheduler:
    """Everything that a decision needs is in the question, so nothing is remembered but the budgets."""

    def __init__(self, hello: dict) -> None:
        self.steps = hello["steps"]

    def plan(self, question: dict) -> dict:
        tokens, seats = self.steps["max_num_batched_tokens"], self.steps["max_num_seqs"]
        sessions, free = question["sessions"], question["available_rows"]
        running = [live for live in sessions if live["state"] == "running"]
        running.sort(key=lambda live: live["until"] - live["computed"] > 1)  # decodes first
        entering = [live for live in sessions if live["state"] == "suspended"]
        entering += [live for live in sessions if live["state"] == "waiting"]
        free -= sum(live["num_rows"] - live["computed"] for live in running)
        chunks = []
        for live in running:
            length = min(live["until"] - live["computed"], tokens, self.steps["max_chunk_tokens"])
            if length > 0:
                chunks.append(self.interval(live, length))
                tokens -= length
        for live in entering:
            need = live["num_rows"] - live["computed"]
            if tokens < 1 or need > free or len(running) + 1 > seats:
                break  # nobody overtakes
            length = min(live["until"] - live["computed"], tokens, self.steps["max_chunk_tokens"])
            chunks.append(self.interval(live, length))
            running.append(live)
            tokens, free = tokens - length, free - need
        return {"type": "planned", "chunks": chunks}

    def interval(self, live: dict, length: int) -> dict:
        start = live["computed"]
        if OFF_BY_ONE and start and live["emitted"] == 0 and length > 1:
            return {"session": live["session"], "start": start + 1, "stop": start + length}
        return {"session": live["session"], "start": start, "stop": start + length}


def main() -> None:
    scheduler = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "hello":
            scheduler = Scheduler(message)
            answer = {"type": "ready", "protocol": 1, "name": "intervals.py", "level": "intervals"}
        elif message["type"] == "plan":
            answer = scheduler.plan(message)
        else:  # submit, cancel, preempt, result, failed: the next question says it all
            answer = {"type": "answer"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
