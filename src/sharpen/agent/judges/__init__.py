"""Judges that ask a model for a verdict: by a rubric, between two answers, within a group, several together.

In: a task, an answer, a model to ask. Out: a reward, with a number for each thing that was judged. A model that answers
no verdict is a failure of the judge: nothing is trained on it.

    from sharpen import Criterion, JudgeModel, RubricJudge

    judge = RubricJudge(
        model=JudgeModel(name="grader"),  # an auxiliary model of the run
        criteria=[
            Criterion(name="right", description="The answer is that of the reference.", weight=3.0),
            Criterion(name="short", description="It says nothing that was not asked for."),
        ],
        reference="answer",
    )

- `model`: who is asked, for JSON of a schema (an endpoint or an auxiliary model); the same is asked once
- `rubric`: criteria with weights
- `compare`: an answer against another one, and the answers of a group against each other
- `several`: several judges of one answer, and a second one that only watches
"""
