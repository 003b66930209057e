"""The short way from Python: a model, data and budgets in; runs, tables and reports out.

    import sizewise

    print(sizewise.plan("preresnet20", "digits", budgets=["2MB", "7MB"], method="fedepth"))
    run = sizewise.federate("preresnet20", "digits", budgets=["2MB", "7MB"], method="fedepth")
    run.report("report.html")
    run.export("phone.safetensors", memory="20MB")

It is a config and a session underneath; those offer everything. `arguments` makes the config,
`planning` shows what it would do, `running` does it, `comparing` does it with several methods.
"""
