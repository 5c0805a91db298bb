"""`sharpen view`: a local web page over run directories, during a run and after it.

- `server`: the server, for whoever has the token
- `pages`: each page: its route, its data, its template
- `data/`: what pages show, as plain records
- `templates/`: how they show it
- `static/`: their scripts and styles
- `library`: the runs on view, kept up to date
- `folders`: finds them
- `files`: reads their files, whatever state these are in
- `index`: what is listed, sorted and searched, in a file beside
- `entries`: what it reads of each rollout
- `follow`: tells pages that a run has grown
- `notes`: thumbs and notes of people
- `labelling`: answers that their owner marks for a judge, with a server of their own
- `diagnoses`: diagnoses, made beside the pages
- `drawing`: numbers as small drawings
"""
