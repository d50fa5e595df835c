/** For test_tokenizer.py: what the engine's tokenizer makes of texts, ids and messages. */
import { readFileSync } from 'node:fs';

import { StopFilter } from '../../web/engine/detokenizer.js';
import { toMessage } from '../../web/engine/errors.js';
import { ChatTokenizer } from '../../web/engine/tokenizer.js';

const { folder, texts = [], ids = [], chats = [], stops = [] } = JSON.parse(readFileSync(0, 'utf8'));
const json = (name) => JSON.parse(readFileSync(`${folder}/${name}`, 'utf8'));

function attempt(make) {
  try {
    return make();
  } catch (error) {
    return { error: toMessage(error) };
  }
}

function stream(tokenizer, list) {
  const text = tokenizer.stream();
  return [...list.map((id) => text.push(id)), text.finish()];
}

const answer = attempt(() => {
  const tokenizer = new ChatTokenizer(json('tokenizer.json'), json('tokenizer_config.json'));
  return {
    texts: texts.map((text) => ({
      plain: tokenizer.encode(text, { special: false }),
      special: tokenizer.encode(text),
    })),
    ids: ids.map((list) => ({ decoded: tokenizer.decode(list), pieces: stream(tokenizer, list) })),
    chats: chats.map((messages) =>
      attempt(() => ({ text: tokenizer.render(messages), ids: tokenizer.prompt(messages) })),
    ),
    stops: stops.map(({ ids: list, stop }) => {
      const filter = new StopFilter(stop);
      return (
        stream(tokenizer, list)
          .map((piece) => filter.push(piece))
          .join('') + filter.finish()
      );
    }),
  };
});
process.stdout.write(JSON.stringify(answer));
