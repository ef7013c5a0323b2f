"""An agent over `tiny`, with the client's own packages: prints what the run did."""

import json

from pydantic_ai import Agent, ModelSettings
from pydantic_ai.messages import RetryPromptPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

called: list[str] = []


def get_time(city: str) -> str:
    """Get the local time of a city"""
    called.append(city)
    return '{"time": "10:30"}'


provider = OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="none")
settings = ModelSettings(temperature=0, max_tokens=200)
agent = Agent(OpenAIChatModel("tiny", provider=provider), tools=[get_time], model_settings=settings)
result = agent.run_sync("What time is it in Rome?", usage_limits=UsageLimits(request_limit=8))
parts = [part for message in result.all_messages() for part in message.parts]
report = {
    "answer": result.output,
    "called": called,
    "asked": [part.args_as_dict()["city"] for part in parts if isinstance(part, ToolCallPart)],
    "retries": sum(isinstance(part, RetryPromptPart) for part in parts),
}
print(json.dumps(report))
