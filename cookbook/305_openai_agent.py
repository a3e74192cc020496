"""Lesson 305: an agent. A model is taught to use a tool; OpenAI's own client then runs the loop against the checkpoint.

The server speaks a second protocol under /v1. Its models are the base models and every checkpoint that was saved for sampling, by the
tinker:// path. It writes the tools into the prompt in the model's own form, and reads the model's calls back out of what it says; so an
agent that was written for OpenAI's client works against a model of your own by a change of base URL and model name.

The base model is too small to call a tool well. It is shown a few conversations: `return_token_ids` tells what a prompt looks like to the
model, so the prompts of training are exactly those of the agent. Prints what the base model says, the loss, and the agent's conversations.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: HF_HUB_OFFLINE=1 python cookbook/305_openai_agent.py
"""

import json

import tinker
from connect import API_KEY, options
from openai import OpenAI
from tinker import types
from transformers import PreTrainedTokenizerBase

STOCK = {"apples": 12, "pears": 7, "plums": 31}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "How many of a fruit are in stock",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    },
}
MAX_TURNS = 4

Turns = list[dict]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--fruits", type=int, default=len(STOCK), help="how many of them the agent learns and is asked about")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.base_url}/v1", api_key=API_KEY)
    service = tinker.ServiceClient(base_url=args.base_url, api_key=API_KEY)
    training = service.create_lora_training_client(base_model=args.base_model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()
    fruits = list(STOCK)[: args.fruits]

    print("1. The base model, with the tool at hand:")
    for turn in run(client, args.base_model, question("apples")):
        show(turn)

    print("2. Two lessons a fruit: call the tool; then answer with what it said.")
    examples = [example for fruit in fruits for example in conversations(client, args.base_model, tokenizer, fruit)]
    num_tokens = sum(sum(example.loss_fn_inputs["weights"].data) for example in examples)
    losses = []
    for _ in range(args.steps):
        computed = training.forward_backward(examples, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=args.learning_rate, eps=1e-8, grad_clip_norm=1.0)).result()
        losses.append(computed.result().metrics["loss:sum"] / num_tokens)
    print(f"   loss per answer token {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], "the loss must fall"

    print("3. The checkpoint is a model of /v1.")
    model = training.save_weights_for_sampler(name="clerk").result().path
    assert model in [each.id for each in client.models.list()]
    print(f"   {model}")

    print("4. The agent:")
    for fruit in fruits:
        turns = run(client, model, question(fruit))
        for turn in turns:
            show(turn)
        assert any(turn["role"] == "tool" for turn in turns), "the tool was not called"
        assert count(fruit) in turns[-1]["content"], "the answer does not say what the tool said"
    service.close("success").result()


def question(fruit: str) -> Turns:
    return [{"role": "user", "content": f"How many {fruit} do we have?"}]


def count(fruit: str) -> str:
    """The tool."""
    return str(STOCK.get(fruit, 0))


def run(client: OpenAI, model: str, turns: Turns) -> Turns:
    """The loop of every agent: ask, do what the model asks for, tell it, ask again; until it asks for nothing more."""
    turns = list(turns)
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model=model, messages=turns, tools=[TOOL], temperature=0, max_tokens=32)
        message = reply.choices[0].message
        turns.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            turns.append({"role": "tool", "tool_call_id": call.id, "content": count(str(arguments.get("fruit")))})
        if not message.tool_calls:
            break
    return turns


def conversations(client: OpenAI, model: str, tokenizer: PreTrainedTokenizerBase, fruit: str) -> list[types.Datum]:
    """What the model is to say to the question, and to the tool's answer."""
    arguments = json.dumps({"fruit": fruit})
    spoken = f'<tool_call>\n{{"name": "count", "arguments": {arguments}}}\n</tool_call>'
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": arguments}}
    asked = question(fruit)
    told = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": count(fruit)},
    ]
    answers = [(asked, spoken), (told, f"We have {count(fruit)} {fruit}.")]
    return [datum(tokenizer, prompt_of(client, model, turns), answer) for turns, answer in answers]


def prompt_of(client: OpenAI, model: str, turns: Turns) -> list[int]:
    """The tokens that the server makes of a conversation."""
    reply = client.chat.completions.create(model=model, messages=turns, tools=[TOOL], max_tokens=1, extra_body={"return_token_ids": True})
    return reply.prompt_token_ids


def datum(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: str) -> types.Datum:
    """Only the answer has weight."""
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + said
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said)
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def show(turn: dict) -> None:
    for call in turn.get("tool_calls", ()):
        print(f"   {turn['role']:>9}: calls {call['function']['name']} {call['function']['arguments']}")
    if turn.get("content"):
        print(f"   {turn['role']:>9}: {turn['content']!r}")


if __name__ == "__main__":
    main()
