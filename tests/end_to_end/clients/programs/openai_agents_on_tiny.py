"""An agent over `tiny`, with the client's own packages: prints what the run did."""

import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
called: list[str] = []
WEATHER = '{"weather": "rain"}'


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    called.append(city)
    return WEATHER


client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0)
agent = Agent(
    name="Guide",
    model=OpenAIChatCompletionsModel(model="tiny", openai_client=client),
    tools=[get_weather],
    # the first call is forced; then the SDK leaves the choice to the model
    model_settings=ModelSettings(temperature=0, max_tokens=200, tool_choice="required"),
)
result = Runner.run_sync(agent, "What is the weather in Rome?", max_turns=8)
calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
report = {
    "answer": result.final_output,
    "called": called,
    "asked": [json.loads(call.arguments)["city"] for call in calls],
    "failures": [output for output in outputs if output != WEATHER],
}
print(json.dumps(report))
