/** Text to token ids and back, and messages to a prompt, by the libraries of the field. */
import { Template } from '../vendor/jinja.js';
import { Tokenizer } from '../vendor/tokenizers.js';
import { isObject, isText, show } from './checks.js';
import { createDetokenizer } from './detokenizer.js';
import { TercetError, packError } from './errors.js';

/** @typedef {{role: string, content: string}} Message */

const SPECIAL = ['bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token'];
const ROLE = /^[a-z][a-z_]{0,31}$/;

export class ChatTokenizer {
  /**
   * @param {Record<string, any>} tokenizer parsed tokenizer.json
   * @param {Record<string, any>} config parsed tokenizer_config.json
   * @throws {TercetError} `pack-unsupported`
   */
  constructor(tokenizer, config) {
    try {
      this.library = new Tokenizer(tokenizer, config);
      const source = templateOf(config);
      this.template = source === null ? null : new Template(source);
    } catch (error) {
      throw new TercetError(
        'pack-unsupported',
        `The pack's tokenizer cannot be used: ${/** @type {Error} */ (error).message}`,
        { cause: error },
      );
    }
    this.specialTokens = specialTokens(config);
    const added = this.library.get_added_tokens_decoder();
    /** @type {import('./detokenizer.js').Vocabulary} */
    this.vocabulary = {
      token: (id) => this.library.id_to_token(id),
      isSpecial: (id) => added.get(id)?.special === true,
      isAdded: (id) => added.has(id),
      byteLevel: isByteLevel(tokenizer.decoder),
      decode: (ids) => this.decode(ids),
    };
  }

  /**
   * @param {string} text
   * @param {{special?: boolean}} [options] special: with the tokens that the tokenizer puts around a text, such as BOS
   * @returns {number[]}
   */
  encode(text, { special = true } = {}) {
    const { ids } = this.library.encode(text, { add_special_tokens: special });
    const bos = this.specialTokens.bos_token;
    // A text that begins with BOS itself gets no second one.
    const isDouble = special && bos !== undefined && text.startsWith(bos) && ids.length > 1 && ids[0] === ids[1];
    return isDouble && this.library.id_to_token(ids[0]) === bos ? ids.slice(1) : ids;
  }

  /** @param {number[]} ids @returns {string} without special tokens */
  decode(ids) {
    const text = ids.filter((id) => this.vocabulary.token(id) !== undefined && !this.vocabulary.isSpecial(id));
    return text.length ? this.library.decode(text, { clean_up_tokenization_spaces: false }) : '';
  }

  /** @returns {import('./detokenizer.js').Detokenizer} */
  stream() {
    return createDetokenizer(this.vocabulary);
  }

  /**
   * @param {Message[]} messages
   * @param {boolean} [goOn] the last message is an answer that goes on
   * @returns {string} the prompt, up to where the answer begins or goes on
   * @throws {TercetError} `bad-request`, `pack-unsupported`
   */
  render(messages, goOn = false) {
    if (!this.template) {
      throw new TercetError('pack-unsupported', 'The pack has no chat template, so it cannot be chatted with.', {
        action: 'Choose a chat model, or use engine.generate with token ids.',
      });
    }
    const checked = checkMessages(messages);
    try {
      const text = this.template.render({
        messages: checked,
        add_generation_prompt: !goOn,
        tools: null,
        documents: null,
        ...this.specialTokens,
      });
      return goOn ? upToTheEnd(text, checked[checked.length - 1].content) : text;
    } catch (error) {
      throw new TercetError(
        'bad-request',
        `The model's chat template refuses these messages: ${/** @type {Error} */ (error).message}`,
        { cause: error },
      );
    }
  }

  /**
   * The template writes BOS itself where the model wants it, so none is added.
   * @param {Message[]} messages
   * @param {boolean} [goOn] the last message is an answer that goes on
   * @returns {number[]}
   */
  prompt(messages, goOn = false) {
    return this.encode(this.render(messages, goOn), { special: false });
  }
}

/**
 * A rendered conversation without what the template puts after its last message. Templates may trim messages.
 * @param {string} text
 * @param {string} content
 */
function upToTheEnd(text, content) {
  const last = content.trim();
  const at = text.lastIndexOf(last);
  if (at < 0) throw new Error('the template changes the last message, so that it cannot go on');
  return text.slice(0, at + last.length) + content.slice(content.trimEnd().length);
}

/** @param {Record<string, any>} config @returns {string|null} */
function templateOf({ chat_template: template = null }) {
  if (template === null || isText(template)) return template;
  const named = Array.isArray(template) ? (template.find((one) => one?.name === 'default') ?? template[0]) : null;
  if (!isText(named?.template)) {
    throw packError('field', `tokenizer_config.json: chat_template is ${show(template)}, expected a text.`);
  }
  return named.template;
}

/** @param {Record<string, any>} config @returns {Record<string, string>} as templates name them */
function specialTokens(config) {
  /** @type {Record<string, string>} */
  const tokens = {};
  for (const name of SPECIAL) {
    const text = isObject(config[name]) ? config[name].content : config[name];
    if (isText(text)) tokens[name] = text;
  }
  return tokens;
}

/** @param {any} decoder @returns {boolean} */
const isByteLevel = (decoder) =>
  decoder?.type === 'ByteLevel' || (decoder?.type === 'Sequence' && decoder.decoders.some(isByteLevel));

/**
 * @param {unknown} messages
 * @returns {Message[]}
 */
function checkMessages(messages) {
  if (!Array.isArray(messages) || messages.length === 0) {
    throw new TercetError(
      'bad-request',
      `messages is ${show(messages)}, expected a list of {role, content}, at least one.`,
    );
  }
  return messages.map((message, index) => {
    const content = contentOf(message?.content);
    if (!isText(message?.role) || !ROLE.test(message.role) || content === null) {
      throw new TercetError(
        'bad-request',
        `messages[${index}] is ${show(message)}, expected {role, content} with texts.`,
        { detail: { index } },
      );
    }
    return { role: message.role, content };
  });
}

/**
 * A text, or the text parts of other chat APIs; half surrogate pairs, which UTF-8 cannot hold, are replaced.
 * @param {any} content
 * @returns {string|null}
 */
function contentOf(content) {
  if (typeof content === 'string') return content.replace(/\p{Surrogate}/gu, '\ufffd');
  if (!Array.isArray(content) || !content.every((part) => part?.type === 'text' && typeof part.text === 'string')) {
    return null;
  }
  return contentOf(content.map((part) => part.text).join(''));
}
