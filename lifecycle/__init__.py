"""The life of every rollout request as one explicit state machine."""
