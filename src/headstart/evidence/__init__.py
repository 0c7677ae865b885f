"""How a claim is made: the workloads as data (`headstart.evidence.cases`)."""
