"""What the trainings of tests/test_kinds_of_training.py give to verl: a reward, a tool, and who calls it."""

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


def compute_score(solution_str, **_):
    return float(len(solution_str) % 7)


@function_tool
def look_up(name: str) -> str:
    """Look a name up.

    Args:
        name: what to look up.
    """
    return f"{name} is in the first drawer."


@ToolParser.register("always")
class AlwaysCalling(ToolParser):
    """Ends a turn at one token of sixteen, and takes whatever the policy has said for a call."""

    @property
    def stop_token_ids(self):
        return list(range(0, len(self.tokenizer), 16))

    async def extract_tool_calls(self, responses_ids, tools=None):
        call = FunctionCall(name="look_up", arguments='{"name": "the key"}')
        return self.tokenizer.decode(responses_ids), [call]
