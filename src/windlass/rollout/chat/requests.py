"""Requests of the three OpenAI APIs, as one `Call`.

The endpoint refuses a setting that it does not know or cannot apply, and names the setting in the error. It accepts and
ignores settings that do not change the answer (for example `user`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from windlass.errors import ConfigError
from windlass.rollout.chat.messages import NO_TOOLS, Message, Template, ToolCall
from windlass.rollout.images import encoded_image
from windlass.rollout.text import check_template_arguments
from windlass.sampling import SamplingParams

MAX_MESSAGES = 8192
"""Largest number of messages in a request."""
MAX_TOOLS = 1024
"""Largest number of tools in a request."""
MAX_CHOICES = 16
"""Largest number of answers to a request."""
MAX_TOP = 20
"""Largest number of most probable tokens at each place, as in OpenAI's API."""
OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""Entry in `include` of a response that asks for log-probabilities."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Token id; tokenizers raise errors for larger and for negative integers."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: object = None

    @property
    def is_image(self) -> bool:
        """Whether the part is an image of a chat completion."""
        return self.type == "image_url"


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    # Extensions of vLLM and SGLang. Some clients send values that are not text.
    reasoning_content: object = None
    reasoning: object = None


class _FunctionSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True):
    function: _FunctionSchema
    type: Literal["function"] = "function"


class _NamedFunction(msgspec.Struct, frozen=True):
    name: str


class _NamedTool(msgspec.Struct, frozen=True):
    """Choice of one function: chat completions nest the name, responses do not."""

    type: Literal["function"] = "function"
    function: _NamedFunction | None = None
    name: str = ""

    @property
    def chosen(self) -> str:
        """Name of the function."""
        return self.function.name if self.function else self.name


ToolChoice = Literal["none", "auto", "required"] | _NamedTool


class _JsonSchema(msgspec.Struct, frozen=True):
    name: str = ""
    schema: dict[str, Any] | None = None


class _Format(msgspec.Struct, frozen=True):
    """Format of the answer: chat completions nest the schema, responses do not."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None
    schema: dict[str, Any] | None = None

    def required_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None for text; raise `ConfigError` if `json_schema` has no schema."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema if self.json_schema else self.schema
        if self.type == "json_schema" and schema is None:
            raise ConfigError("response_format: json_schema needs a schema, got none")
        return schema or {"type": "object"}


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all three APIs."""

    model: str = ""
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Extensions of vLLM and SGLang.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    # Accepted, and of no effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: _Format | None = None
    stream_options: _StreamOptions | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # Extension of vLLM and SGLang.
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`. The prompt is one text, the token ids of one prompt, or a list with one prompt."""

    prompt: str | list[TokenId | str | list[TokenId]]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: int | None = None
    stream_options: _StreamOptions | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    # Extension of vLLM.
    add_special_tokens: bool | None = None


class _Item(msgspec.Struct, frozen=True):
    """Item of a response's input or output."""

    type: str = "message"
    role: Role = "user"
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[_Part] | None = None


class _FlatTool(msgspec.Struct, frozen=True):
    name: str = ""
    type: str = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(msgspec.Struct, frozen=True):
    format: _Format | None = None
    verbosity: str | None = None


class ResponseRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses`."""

    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_FlatTool] | None = None
    tool_choice: ToolChoice | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    text: _Text | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    background: Literal[False] | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One request, independent of the API.

    Attributes:
        messages: conversation; empty for a text prompt.
        prompt: text or token ids; None for a conversation.
        add_special_tokens: whether a text prompt gets the tokens that the model expects around a text.
        template: tools and other arguments of the chat template.
        parses_tools: whether calls in the answer are parsed.
        parallel_calls: whether the reply may contain several tool calls. If not, it contains only the first.
        sampling: sampling parameters of the engine's calls.
        num_choices: number of answers.
        forced: whether the answer must be one tool call as JSON.
        logprobs: whether the reply contains the log-probability of each token.
        num_top: number of most probable tokens per place. The reply contains their log-probabilities.
        keep_seed: whether the seed in `sampling` is that of the request, so that the engine gets it unchanged. With
            several answers, answer i gets the seed plus i.
        new_messages: for `/v1/responses`: messages that a later request may continue. These are the messages of earlier
            responses and the input of this request, without instructions.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    add_special_tokens: bool = True
    template: Template = NO_TOOLS
    parses_tools: bool = False
    parallel_calls: bool = True
    num_choices: int = 1
    forced: bool = False
    logprobs: bool = False
    num_top: int = 0
    keep_seed: bool = False
    new_messages: tuple[Message, ...] = ()


_DECIDED = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Settings that a request may have only if `Policy.request_sampling` is set."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Sampling of a session.

    Attributes:
        sampling: the submitter's sampling parameters.
        request_sampling: whether the request decides about seed, temperature, `top_p`, `top_k`, `min_p`, penalties and
            `logit_bias`. If not, the submitter's values apply, and a request with `logit_bias` or a penalty of OpenAI's
            API is refused.
    """

    sampling: SamplingParams
    request_sampling: bool = False

    def of(
        self,
        request: CommonRequest,
        *,
        max_tokens: int | None,
        stop: str | Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters of a request.

        Args:
            request: the request.
            max_tokens: largest number of new tokens that the request allows; the submitter's limit also applies.
            stop: stop texts that the request names; the submitter's stop texts also apply.
            schema: JSON schema of the answer; None for text.

        Raises:
            ConfigError: a value is invalid, or the endpoint cannot apply it.
        """
        for name in () if self.request_sampling else _DECIDED:
            if value := getattr(request, name):
                raise ConfigError(
                    f"{name}: must be left out, got {value!r}; the submitter's sampling applies, unless the session has "
                    "request_sampling=True"
                )
        limit = self.sampling.max_new_tokens
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: must be >= 1, got {max_tokens}")
        texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
        changed: dict[str, Any] = {
            "max_new_tokens": limit if max_tokens is None else min(limit, max_tokens),
            "stop": (*self.sampling.stop, *texts),
        }
        changed["min_new_tokens"] = min(self.sampling.min_new_tokens, changed["max_new_tokens"])
        if schema is not None:
            changed |= {"json_schema": msgspec.json.encode(schema).decode(), "regex": ""}
        if self.request_sampling:
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *_DECIDED)
            given = {name: getattr(request, name) for name in names} | {
                "sampling_seed": request.seed
            }
            changed |= {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(self.sampling, **changed)

    def keeps_seed(self, request: CommonRequest) -> bool:
        """Return whether the seed of a request reaches the engine unchanged."""
        return self.request_sampling and request.seed is not None


def chat_call(request: ChatRequest, policy: Policy) -> Call:
    """Convert a chat completion request to a `Call`; raise `ConfigError` if the endpoint cannot answer it."""
    messages = tuple(_message_of(message) for message in request.messages)
    tools = tuple(msgspec.to_builtins(tool) for tool in request.tools or ())
    given = request.chat_template_kwargs or {}
    arguments = {**_effort_arguments(request.reasoning_effort), **given}
    check_template_arguments("chat_template_kwargs:", arguments)
    schema = request.response_format.required_schema() if request.response_format else None
    call_schema = _call_schema(tools, request.tool_choice)
    sampling = policy.of(
        request,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=request.stop,
        schema=call_schema or schema,
    )
    return _checked(
        Call(
            messages,
            sampling,
            template=Template(tools, arguments),
            parses_tools=bool(tools) and request.tool_choice != "none",
            parallel_calls=request.parallel_tool_calls is not False,
            num_choices=1 if request.n is None else request.n,
            forced=call_schema is not None,
            logprobs=bool(request.logprobs),
            num_top=_num_top(request, logprobs=bool(request.logprobs)),
            keep_seed=policy.keeps_seed(request),
        )
    )


def completion_call(request: CompletionRequest, policy: Policy) -> Call:
    """Convert a completion request to a `Call`; raise `ConfigError` if the endpoint cannot answer it."""
    sampling = policy.of(request, max_tokens=request.max_tokens, stop=request.stop)
    return _checked(
        Call(
            (),
            sampling,
            prompt=_prompt_of(request.prompt),
            add_special_tokens=request.add_special_tokens is not False,
            num_choices=1 if request.n is None else request.n,
            logprobs=request.logprobs is not None,
            num_top=_in_range("logprobs", request.logprobs or 0),
            keep_seed=policy.keeps_seed(request),
        )
    )


def _prompt_of(prompt: str | Sequence[int | str | list[int]]) -> str | tuple[int, ...]:
    """Return the text or the token ids of a prompt. Raise `ConfigError` if `prompt` has several prompts."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(only := prompt[0], str | list):
        return only if isinstance(only, str) else tuple(only)
    ids = tuple(each for each in prompt if isinstance(each, int))
    if len(ids) < len(prompt):
        raise ConfigError(f"prompt: must be one prompt, got {len(prompt)}; send a request for each")
    return ids


def response_call(request: ResponseRequest, policy: Policy, previous: Sequence[Message]) -> Call:
    """Convert a response request to a `Call`. Its messages are the instructions, `previous`, and the request's input.

    `previous` contains all messages up to the previous response, and this response.

    Raises:
        ConfigError: the endpoint cannot answer the request.
    """
    new = (
        [Message("user", request.input)]
        if isinstance(request.input, str)
        else _messages_of_items(request.input)
    )
    # Instructions apply to one response only, so `previous` does not contain them.
    begin = [Message("system", request.instructions)] if request.instructions else []
    tools = []
    for tool in request.tools or ():
        if tool.type != "function":
            raise ConfigError(f"tools: type must be 'function', got {tool.type!r}")
        schema = _FunctionSchema(tool.name, tool.description, tool.parameters)
        tools.append(msgspec.to_builtins(_Tool(schema)))
    text_format = request.text.format if request.text else None
    call_schema = _call_schema(tools, request.tool_choice)
    sampling = policy.of(
        request,
        max_tokens=request.max_output_tokens,
        schema=call_schema or (text_format.required_schema() if text_format else None),
    )
    logprobs = OUTPUT_LOGPROBS in (request.include or ())
    return _checked(
        Call(
            (*begin, *previous, *new),
            sampling,
            template=Template(
                tuple(tools), _effort_arguments((request.reasoning or {}).get("effort"))
            ),
            parses_tools=bool(tools) and request.tool_choice != "none",
            parallel_calls=request.parallel_tool_calls is not False,
            forced=call_schema is not None,
            logprobs=logprobs,
            num_top=_num_top(request, logprobs=logprobs),
            keep_seed=policy.keeps_seed(request),
            new_messages=(*previous, *new),
        )
    )


def _effort_arguments(effort: str | None) -> dict[str, object]:
    """Return the arguments that vLLM passes to the chat template for this reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _num_top(request: CommonRequest, *, logprobs: bool) -> int:
    """Return `top_logprobs` of a request; raise `ConfigError` if it is set without a request for log-probabilities."""
    if request.top_logprobs and not logprobs:
        raise ConfigError(
            f"top_logprobs: must be left out without logprobs, got {request.top_logprobs}; add logprobs=true (chat "
            f"completions) or include={[OUTPUT_LOGPROBS]} (responses)"
        )
    return _in_range("top_logprobs", request.top_logprobs or 0)


def _in_range(name: str, num_top: int) -> int:
    """Return `num_top`; raise `ConfigError` if it is negative or above `MAX_TOP`."""
    if not 0 <= num_top <= MAX_TOP:
        raise ConfigError(f"{name}: must be in [0, {MAX_TOP}], got {num_top}")
    return num_top


def _checked(call: Call) -> Call:
    """Return the call; raise `ConfigError` if its prompt is empty, or if it has too many messages, tools or answers."""
    if call.prompt is None and not call.messages:
        raise ConfigError("messages or input: must not be empty, got []")
    if call.prompt is not None and not call.prompt:
        raise ConfigError(f"prompt: must not be empty, got {call.prompt!r}")
    sizes = {
        "messages": (len(call.messages), MAX_MESSAGES),
        "tools": (len(call.template.tools), MAX_TOOLS),
    }
    for name, (size, most) in sizes.items():
        if size > most:
            raise ConfigError(f"{name}: must have at most {most} entries, got {size}")
    if not 1 <= call.num_choices <= MAX_CHOICES:
        raise ConfigError(f"n: must be in [1, {MAX_CHOICES}], got {call.num_choices}")
    return call


def _call_schema(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None
) -> dict[str, Any] | None:
    """Return the JSON schema of a tool call if the request demands a tool call, else None.

    Raise `ConfigError` if `tools` does not have the function that `choice` demands.
    """
    if choice in {None, "none", "auto"}:
        return None
    functions = [tool["function"] for tool in tools]
    names = [each["name"] for each in functions]
    if isinstance(choice, _NamedTool):
        functions = [each for each in functions if each["name"] == choice.chosen]
    if not functions:
        chosen = choice.chosen if isinstance(choice, _NamedTool) else choice
        raise ConfigError(
            f"tools: must have a function for tool_choice={chosen!r}, got {names}; add the function, or use 'auto'"
        )
    schemas: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function["name"]]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _text_of(where: str, content: str | Sequence[_Part] | None) -> str:
    """Return the text of a message's content, with a newline between parts; raise `ConfigError` for content that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in {"text", "input_text", "output_text", "refusal"}:
            raise ConfigError(f"{where}: content must be text, got a part of type {part.type!r}")
    return "\n".join(part.text or part.refusal for part in content)


def _message_of(message: _Message) -> Message:
    """Convert a message of a chat request. Replace the role `developer` by `system`, which chat templates support."""
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    texts = (message.reasoning_content, message.reasoning)
    reasoning = next((text for text in texts if text and isinstance(text, str)), "")
    content, parts = message.content, tuple[str | bytes, ...]()
    if isinstance(content, list) and any(part.is_image for part in content):
        parts = tuple(map(_image_or_text_of, content))
        content = [part for part in content if not part.is_image]
    return Message(
        "system" if message.role == "developer" else message.role,
        _text_of("messages", content),
        reasoning if message.role == "assistant" else "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        parts=parts,
    )


def _image_or_text_of(part: _Part) -> str | bytes:
    """Return the encoded image or the text of a part; raise `ConfigError` for another part, or an image that is no data URL."""
    if part.is_image:
        return encoded_image("messages", {"type": part.type, "image_url": part.image_url})
    return _text_of("messages", [part])


def _messages_of_items(items: Sequence[_Item]) -> list[Message]:
    """Return the messages of the items in a request's `input`.

    Items of one answer (reasoning, texts and calls) become one message.

    Raises:
        ConfigError: the type of an item is not supported, or its content is not text.
    """
    found: list[Message] = []
    reasoning = ""
    for item in items:
        if item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            reasoning += "".join(part.text for part in parts if part.type == "reasoning_text")
            continue
        begun, reasoning = reasoning, ""
        if item.type == "function_call_output":
            found.append(Message("tool", _text_of("input", item.output), tool_call_id=item.call_id))
            continue
        if item.type == "function_call":
            calls = (ToolCall(item.call_id, item.name, item.arguments),)
            message = Message("assistant", "", begun, calls)
        elif item.type == "message":
            role = "system" if item.role == "developer" else item.role
            text = _text_of("input", item.content)
            message = Message(role, text, begun if role == "assistant" else "")
        else:
            raise ConfigError(f"input: item type {item.type!r} is not supported")
        last = found[-1] if found else None
        if message.role == "assistant" and last is not None and last.role == "assistant":
            found[-1] = msgspec.structs.replace(
                last,
                content=last.content + message.content,
                reasoning=last.reasoning + message.reasoning,
                tool_calls=last.tool_calls + message.tool_calls,
            )
        else:
            found.append(message)
    return found
