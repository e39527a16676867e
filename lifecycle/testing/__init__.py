"""For the tests of those who embed the engine: a scripted backend, a store contract, a loop with virtual time."""
