"""The API process: OpenAI routes over an `EngineClient`. No torch anywhere below this package."""
