"""Stands for the prompts of Trinity-RFT's example `learn_to_ask`."""

rollout_prompt_med = "Ask the patient one question with choices, or write <stop /> if you know enough."
rollout_prompt_med_Ra = "Ask the patient one question with choices."
reward_prompt_med = (
    "Rate the doctor's last message: <content_score>0 to 1</content_score> for how it gets at the facts, "
    "<format_score>0 to 1</format_score> for being one question. Facts: {}"
)
