"""The names and objects of the tuners that came before: AgentScope's, Trinity-RFT's."""
