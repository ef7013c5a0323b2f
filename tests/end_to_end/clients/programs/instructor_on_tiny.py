"""Answers of `tiny` that are held to a schema, with the client's own packages: prints each."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Boat(BaseModel):
    color: Literal["red", "blue"]
    is_large: bool


server = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0)
question = [{"role": "user", "content": "The boat is blue and large. Write JSON."}]
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(server, mode=mode)
    boat = client.create(
        model="tiny", messages=question, response_model=Boat, max_retries=0, temperature=0
    )
    print(type(boat).__name__)
